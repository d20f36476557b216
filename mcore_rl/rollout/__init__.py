"""Rollout: what an engine is asked for, and several of them behind one queue.

``engine``: one vLLM engine and its process.  ``receiver``: what runs inside vLLM's workers and takes weights in.
``protocol.py``, to be read first, needs neither torch nor vLLM.
"""
