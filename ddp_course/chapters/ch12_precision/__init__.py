"""Chapter 12: which numbers may be rounded?"""
