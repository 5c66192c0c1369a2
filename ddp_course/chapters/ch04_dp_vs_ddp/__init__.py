"""Chapter 04: Why did PyTorch abandon threads for processes?"""
