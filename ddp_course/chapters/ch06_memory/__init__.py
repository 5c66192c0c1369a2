"""Chapter 06: Where does the memory go?"""
