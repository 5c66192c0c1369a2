"""Chapter 15: In which order should gradients travel?"""
