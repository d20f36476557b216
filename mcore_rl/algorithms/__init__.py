"""The mathematics of reinforcement learning, in torch alone: KL, advantages, losses, corrections.

Functions take tensors and return tensors and sums; none knows of processes, models or files.  Read ``policy.py`` (the
actor's loss) first.
"""
