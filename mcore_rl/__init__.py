"""RL post-training for large MoE and dense language models, on Megatron-core."""

__version__ = "0.1.0"
