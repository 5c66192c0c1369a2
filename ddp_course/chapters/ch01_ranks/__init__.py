"""Chapter 01: Who am I?"""
