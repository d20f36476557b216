"""One engine: vLLM in a process of its own, how it is started, asked, watched and ended.

Read ``process.py`` first (the parent's side), then ``server.py`` (the child's) and ``vllm_engine.py``.  vLLM changes
seeds, threads and process groups of its process, so nothing here is imported beside Megatron but the parent's side.
"""
