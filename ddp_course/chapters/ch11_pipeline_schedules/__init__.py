"""Chapter 11: How small can the bubble get?"""
