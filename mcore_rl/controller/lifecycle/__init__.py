"""What a run goes through besides its steps: checks, start, checkpoints, preemption, faults, the end.

Read ``start.py`` first: it opens a run and takes it down again.
"""
