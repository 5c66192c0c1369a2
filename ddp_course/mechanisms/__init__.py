"""Floor 1: what several strategies are made of. They never import each other.

    parts       objects to which a strategy announces its moments
    agreement   do all ranks mean the same? modules and arguments, compared once
    broadcast   one rank's tensors for all
    engine      gradient -> bucket -> launch in order -> wait; a reducer says how
    buckets     which gradients travel together: plain data
    comm_hook   a user's function that sends a bucket, as in PyTorch
    hooks       how autograd tells that a gradient is there
    recovery    flags after every pass: which have failed, which gradients are missing
    timeline    what a step writes into the open event logs
    placements  which part of which parameter of the plain model a rank has, and the
                norm of the whole gradient, which follows from that
    divided     a module that is divided, and what it was before
    assembly    whole tensors and states of optimizers from the ranks' parts: each
                number has one owner
    whole_state the states of a divided module, put together by it
    saving      files that are whole or not there, and are what was written
    frozen, guards
                what would be wrong in silence once a model is wrapped
    elementwise may an optimizer step parts of a tensor alone?
    trial       each optimizer of a divided model is tried out before its first step
    exchange    activations are gathered and reduced
    shard_collectives
                and so are shards, by PyTorch's collectives
    recompute   backward that runs forward again, so that less is kept

Chapters 04 to 13 explain them.
"""

from ddp_course.mechanisms import trial

trial.watch()  # strategies that divide models need not know of it
