"""Chapter 00: What happens when four processes train one model?"""
