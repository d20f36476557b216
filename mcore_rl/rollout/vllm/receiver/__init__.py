"""Code that runs inside vLLM's workers: it receives weights, writes them in place, and reads them back for checks.

Read ``worker_extension.py`` first.
"""
