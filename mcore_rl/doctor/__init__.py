"""``mcore-rl doctor``: measures a machine or a cluster before a run does, and says what is wrong and what to do.

Read ``checks.py`` first: a check is a row of a table with a function that returns diagnoses.  One file for each
subject; ``command.py`` has the table of all of them, in the order in which they run.
"""
