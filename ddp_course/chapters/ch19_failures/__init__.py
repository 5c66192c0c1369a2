"""Chapter 19: what if a machine dies?"""
