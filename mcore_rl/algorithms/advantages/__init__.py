"""How advantages follow from rewards: one file for each estimator, ``registry.py`` names them all."""
