"""Why log-probabilities differ: vLLM, transformers and Megatron score the same tokens, in processes of their own.

Read ``scoring.py`` first, which runs the three; ``report.py`` compares what they say.
"""
