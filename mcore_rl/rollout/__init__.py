"""Rollout: the interface of an engine, and pools of several engines behind one queue.

``vllm``: the engine that there is.  Read ``protocol.py`` first; it needs neither torch nor vLLM.
"""
