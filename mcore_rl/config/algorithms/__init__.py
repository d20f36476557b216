"""The algorithms, one file each: ``NAME.py`` holds the ``Algorithm`` that ``algorithm=NAME`` chooses.

A file comes with the estimator and the loss that its paper brought; others import them from it.  ``algorithm_registry``
finds the files.  Read ``rloo.py`` first.  What the functions compute is ``mcore_rl/algorithms``.
"""
