"""Why log-probabilities differ: vLLM, transformers and Megatron score the same tokens, each in its own processes.

Read ``scoring.py`` first, which runs the three; ``report.py`` compares their log-probs.
"""
