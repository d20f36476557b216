"""The life of a run around its steps: checks, start, checkpoints, preemption, faults, the end.

Read ``start.py`` first: it opens a run and closes it again.
"""
