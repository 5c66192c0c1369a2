"""Chapter 16: what if one sequence does not fit?"""
