"""Chapter 09: How do two GPUs share one matrix product?"""
