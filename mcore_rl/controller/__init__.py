"""The driver of one run on Ray.  Read ``loop.py`` first: a training step on one screen.

``step``: the parts of a step.  ``lifecycle``: starts, saves, resumes, restarts and ends a run.  ``programs``: the
functions that the command lines call.  ``run.py`` holds what outlives a step.
"""
