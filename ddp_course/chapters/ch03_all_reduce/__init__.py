"""Chapter 03: How few bytes can an all-reduce send?"""
