"""Floor 2: what a training run needs when machines fail. Chapter 19.

Read the modules in this order:

    rates        published counts of failures; the time until one of N devices fails
    interval     seconds of work between two saves: Young's, Daly's, the expected time
    position     samples that all ranks together have used; any number of ranks resumes
    async_save   a copy in memory, written by a thread while training goes on
    notice       SIGTERM, noted by one rank, agreed by all
    digests      replicas compared by digests; ranks that differ; spikes of the loss
"""
