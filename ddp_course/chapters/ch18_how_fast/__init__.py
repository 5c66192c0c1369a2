"""Chapter 18: how fast should it be?"""
