"""How advantages follow from rewards: one file for each estimator, ``estimation.py`` puts a step's together."""
