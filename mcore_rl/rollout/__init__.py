"""Rollout: the interface of an engine, and pools of several engines behind one queue.

``engine``: one vLLM engine and its process.  ``receiver``: the code inside vLLM's workers, which receives weights.
Read ``protocol.py`` first; it needs neither torch nor vLLM.
"""
