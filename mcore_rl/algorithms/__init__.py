"""The mathematics of reinforcement learning, in torch alone: KL, advantages, losses, corrections.

Tensors come in, tensors and sums go out; nothing here knows of processes, models or files.  Read ``policy.py`` (the
actor's loss) first.
"""
