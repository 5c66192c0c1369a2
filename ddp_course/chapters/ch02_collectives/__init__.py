"""Chapter 02: Who sends what to whom?"""
