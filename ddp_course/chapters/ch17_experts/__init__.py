"""Chapter 17, experts: what if a token needs only a part of the weights?"""
