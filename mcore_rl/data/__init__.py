"""Rows of parquet files become prompts and conversations, and sequences become packed, balanced batches.

No model is here.  Read ``prompts.py`` first, then ``packing.py``.
"""
