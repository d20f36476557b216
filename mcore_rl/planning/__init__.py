"""A plan before the run: whether it fits, where each byte goes, and how long a step takes.  No torch, no device."""
