"""One run on Ray, seen from its driver.  Read ``loop.py`` first: a training step on one screen.

``step``: what happens within a step.  ``lifecycle``: what starts, saves, resumes, restarts and ends a run.
``programs``: what a command line calls.  ``run.py`` holds what lives longer than a step.
"""
