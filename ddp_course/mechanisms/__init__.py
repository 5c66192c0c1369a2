"""Floor 1: tools that several strategies share; strategies never import each other.

    parts       objects to which a strategy announces its moments
    agreement   do all ranks have the same arguments? compared once
    replicable  which modules can be replicated, and what all ranks must have alike
    broadcast   send one rank's tensors to all
    engine      gradient -> bucket -> launch in order -> wait; a reducer sends buckets
    buckets     which gradients are sent together: plain data
    comm_hook   a user's function that sends a bucket, as in PyTorch
    host_memory the memory of the CPU beside the device, and the slow link to it
    hooks       calls from autograd when a gradient has been accumulated
    graph       the tensors that a backward pass will reach
    recovery    flags exchanged after every pass: failed passes, missing gradients
    timeline    the events of a backward pass, for the open event logs
    placements  which part of which parameter of the plain model a rank has; the norm of
                the whole gradient; notes for `guards`
    divided     a divided module, and its names and shapes before the division
    assembly    whole tensors and optimizer states, added up from the ranks' parts
    whole_state the full states of a divided module
    saving      checkpoint files that are complete or absent, and verified when read
    frozen, guards
                refuse uses of a wrapped model that would give wrong numbers silently
    elementwise may an optimizer step parts of a tensor alone?
    trial       try out each optimizer of a divided model before its first step
    exchange    gather and reduce activations
    shard_collectives
                gather and reduce shards, by PyTorch's collectives
    recompute   run forward again in backward, so that less is stored

Chapters 04 to 13 explain them.
"""

from ddp_course.mechanisms import guards, trial

guards.watch()  # here, so that no strategy has to call them
trial.watch()
