"""Floor 1: what several strategies are made of. They never import each other.

    replicas    what makes the modules of all ranks the same at the beginning
    hooks       how autograd tells that a gradient is there
    buckets     which gradients travel together: plain data
    timeline    what a step writes into the open event logs
    recompute   backward that runs forward again, so that less is kept; with `again`
    norm        of gradients that lie on many ranks
    whole       the state of one process, of a module that lies on many ranks

Chapters 04 to 08 explain them.
"""
