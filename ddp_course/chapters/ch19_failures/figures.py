"""The figures of chapter 19: lost time, loss curves, saves, digests."""

# ---- lost time over the checkpoint interval ------------------------------------------


# ---- loss curves after an incomplete checkpoint --------------------------------------


# ---- a step with a save --------------------------------------------------------------


# ---- digests -------------------------------------------------------------------------
