"""Which layout should a training run have, and how long is a step? Chapter 18.

Formulas alone: nothing is started, and PyTorch is not imported. Read, in this order:

accelerators  data sheets of GPUs and TPUs: FLOP/s, memory, links, power
workload      a model and one step's batch, and the FLOPs of a token
step_time     what a rank computes, sends and keeps, and the seconds of a step
search        every layout of a cluster, the fastest first, and why others do not fit
anchors       published training runs, to compare predictions with
"""
