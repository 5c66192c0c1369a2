"""Experts: each token uses a part of the weights. Chapter 17. Read, in this order:

naive      a mixture in one process, dense and routed
balance    capacities, the auxiliary loss, the bias
dispatch   experts on several ranks: all-to-all there and back
"""
