"""How advantages follow from rewards: one file per estimator; ``estimation.py`` applies one to a whole step."""
