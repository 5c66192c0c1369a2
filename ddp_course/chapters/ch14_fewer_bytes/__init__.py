"""Chapter 14: Must every gradient travel in every step?"""
