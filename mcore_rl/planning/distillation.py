"""What a teacher in the policy's loss needs beside both models: its hidden states, its output rows, and their products.

The rows are in the host memory of the last stage's processes, and on the device while a step is trained.
"""

from __future__ import annotations

from math import ceil

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.pairs import sequences_per_prompt
from mcore_rl.config.rollout import BYTES
from mcore_rl.config.run import RunConfig
from mcore_rl.parallel.layout import Layout

PRODUCT_ROWS = 512  # ``training/divergence.py``, which needs torch


def hidden_bytes(run: RunConfig, teacher: ModelConfig, per_node: int) -> int:
    """Host memory of a step's hidden states on the node that has most, all responses as long as they may be.

    Every process of the policy has those of its data-parallel coordinate, and the nodes' stores have all of them once.
    """
    if not run.algorithm.distill.in_loss:
        return 0
    tokens = run.data.train_batch_size * sequences_per_prompt(run) * run.data.max_response_length
    of_step = tokens * teacher.hidden_size * BYTES[run.teacher.precision]
    dp = Layout.of(run.actor.parallel, run.trainer.world_size).dp
    return ceil(of_step * (per_node / dp + 1 / run.trainer.nnodes))


def output_bytes(run: RunConfig, policy: ModelConfig, teacher: ModelConfig) -> int:
    """The teacher's output rows on one tensor rank of the policy; 0 if the loss reads none."""
    if not run.algorithm.distill.in_loss:
        return 0
    columns = -(-policy.vocab_size // run.actor.parallel.tp)
    return columns * teacher.hidden_size * BYTES[run.teacher.precision]


def product_bytes(columns: int, rows: int, size: int) -> int:
    """What the loss needs of ``columns`` of both models at ``rows`` tokens: a gradient, and a block of logits."""
    return size * columns * (rows + min(rows, PRODUCT_ROWS))
