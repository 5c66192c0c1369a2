"""Chapter 13: What if nobody waits?"""
