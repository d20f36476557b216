"""What a teacher in the policy's loss needs beside both models: its hidden states, its output rows, and their products.

The rows are in the host memory of the last stage's processes, and on the device while a step is trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from mcore_rl.config.algorithm_object import TEACHER
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.pairs import sequences_per_prompt
from mcore_rl.config.role_table import ROLES
from mcore_rl.config.rollout import BYTES
from mcore_rl.config.run import RunConfig
from mcore_rl.parallel.layout import Layout

PRODUCT_ROWS = 512  # ``training/divergence.py``, which needs torch


def teacher_bytes(
    run: RunConfig, policy: ModelConfig, others: Mapping[str, ModelConfig], per_node: int
) -> tuple[int, int]:
    """(hidden states, output rows): bytes that a teacher in the loss adds; (0, 0) without one.

    The first are in the host memory of the node that has most, all responses as long as they may be: every process of
    the policy has those of its data-parallel coordinate, and the nodes' stores have all of them once.  The second are
    of one tensor rank of the policy.  others: the models of roles that start from another checkpoint.
    """
    if not run.algorithm.distill.in_loss:
        return 0, 0
    teacher = run.role_config(ROLES[TEACHER])
    row = others.get(TEACHER, policy).hidden_size * BYTES[teacher.precision]
    tokens = run.data.train_batch_size * sequences_per_prompt(run) * run.data.max_response_length
    dp = Layout.of(run.actor.parallel, run.trainer.world_size).dp
    columns = -(-policy.vocab_size // run.actor.parallel.tp)
    return ceil(tokens * row * (per_node / dp + 1 / run.trainer.nnodes)), columns * row


def product_bytes(columns: int, rows: int, size: int) -> int:
    """What the loss needs of ``columns`` of both models at ``rows`` tokens: a gradient, and a block of logits."""
    return size * columns * (rows + min(rows, PRODUCT_ROWS))
