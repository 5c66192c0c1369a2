"""Chapter 05: How does DDP hide its communication?"""
