"""Distributed deep-learning training, built from real processes up.

Importing the package starts one helper process in the background, which imports
PyTorch while you read, so that the first four ranks start as quickly as the next
(`ddp_course.launch.warm`). Not in a rank of torchrun, which starts no ranks itself.
"""

from ddp_course.launch import warm
from ddp_course.launch.torchrun import under_torchrun

__version__ = "0.1.0"

if not under_torchrun():
    warm("ddp_course.preload")
