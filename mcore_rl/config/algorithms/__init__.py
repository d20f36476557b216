"""The algorithms, one file each: ``NAME.py`` holds the ``Algorithm`` that ``algorithm=NAME`` chooses.

A file also defines the estimator and the loss that its paper introduced; other files import them from it.
``algorithm_registry`` finds the files.  Read ``rloo.py`` first.  ``mcore_rl/algorithms`` has the functions themselves.
"""
