"""One engine: starts, calls, watches and ends vLLM in a process of its own.

Read ``process.py`` first (the parent's side), then ``server.py`` (the child's side) and ``vllm_engine.py``.  vLLM
changes seeds, threads and process groups of its process, so only the parent's side may be imported beside Megatron.
"""
