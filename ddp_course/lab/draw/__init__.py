"""Figures of more than one chapter: schematics, and plots of measured data.

Read the modules in this order:

    drawing     a small SVG writer
    grid, steps pictures of a plan: every rank's buffer, and the messages of each step
    lanes, timeline
                blocks on a time axis; the recorded events of each rank
    schedule_view, pipeline_timeline
                a simulated schedule; simulated and recorded pipelines on one axis
    kinds, memory, ledgers
                patterns for kinds of memory; memory over time; stored and sent bytes
    shard_map   which rank owns which elements
    plots       figures by matplotlib
    per_rank, sizes
                bytes of each rank beside theory; times against sizes, with a fit
"""
