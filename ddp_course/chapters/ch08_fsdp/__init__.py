"""Chapter 08: Can even the weights be sharded?"""
