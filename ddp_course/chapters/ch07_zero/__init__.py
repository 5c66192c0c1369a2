"""Chapter 07: What does every rank store that it does not need?"""
