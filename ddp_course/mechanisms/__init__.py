"""Floor 1: what several strategies are made of. They never import each other.

    agreement   do all ranks mean the same? modules, arguments, flags
    engine      gradient -> bucket -> launch in order -> wait, to an ending of choice
    buckets     which gradients travel together: plain data
    hooks       how autograd tells that a gradient is there
    timeline    what a step writes into the open event logs
    recompute   backward that runs forward again, so that less is kept
    norm        of gradients that lie on many ranks
    whole       the state of one process, of a module that lies on many ranks

Chapters 04 to 08 explain them.
"""
