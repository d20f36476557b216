"""What runs inside vLLM's workers: weights come in, are written in place, and are read back to be checked.

Read ``worker_extension.py`` first.
"""
