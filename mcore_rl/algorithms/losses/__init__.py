"""Policy losses of tokens: one file for each; ``aggregation.py`` sums them up."""
