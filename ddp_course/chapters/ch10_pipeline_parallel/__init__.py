"""Chapter 10: Why do stages wait?"""
