"""Rehearsals: one rank of the full layout builds, scores and trains at full size on fake tensors.  Read ``rank.py``."""
