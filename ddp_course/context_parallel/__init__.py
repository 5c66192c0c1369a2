"""A sequence that several ranks share. Read, in this order:

naive            all keys and values gathered
ulysses          from parts of the sequence to heads, and back
online_softmax   attention in pieces, merged exactly
ring             keys and values go around
assignment       who has which positions: contiguous, zigzag, striped
"""
