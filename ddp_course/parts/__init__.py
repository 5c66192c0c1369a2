"""Floor 1: what several strategies are made of. They never import each other.

    replicas    what makes the modules of all ranks the same at the beginning
    hooks       how autograd tells that a gradient is there
    buckets     which gradients travel together: plain data
    timeline    what a step writes into the open event logs

Chapters 04 and 05 explain them.
"""
