"""All that knows vLLM: another engine would be a room beside this one.

``engine``: one engine and its process.  ``receiver``: the code inside vLLM's workers, which receives weights.
``oracle``: what vLLM's own model classes store and load, as an independent reference for our tables.
"""
