"""The life of a run around its steps: checks, start, checkpoints, faults, the end.

Read ``preparation.py`` first, which says what a run reads and checks before a process starts.
"""
