"""Policy losses of tokens: one file for each, ``registry.py`` names them all, ``aggregation.py`` sums them up."""
