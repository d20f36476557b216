"""Policy losses of tokens, one file per loss; ``aggregation.py`` sums them up."""
