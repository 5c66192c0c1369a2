"""Floor 2: experts: each token uses a part of the weights.

Read the modules in this order:

    naive      a mixture of experts in one process, dense and routed
    balance    capacities, the auxiliary loss and the bias that keep all experts busy
    segments   rows sorted by expert: no token is dropped, and no row is padded
    gathered   experts on several ranks: every rank sees all tokens
    dispatch   experts on several ranks: all-to-all to the experts, and back
    metered    an exchange of rows that byte meters count
    gpt        the course's GPT with a mixture in place of each MLP
    axis       what `parallelize` calls to divide a model's experts among ranks of dp
"""
