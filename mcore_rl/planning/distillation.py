"""What teachers in the policy's loss need beside the models: hidden states, output rows, and their products.

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


def num_teachers(run: RunConfig) -> int:
    """How many sets of weights teach: one is live, the others are snapshots beside it."""
    return 0 if run.teachers is None else len(run.teachers.directories)


def hidden_bytes(run: RunConfig, policy: ModelConfig, others: Mapping[str, ModelConfig], per_node: int) -> int:
    """Bytes of the hidden states of a teacher in the loss, on the node that has most; 0 without one.

    In host memory, all responses as long as they may be: every process of the policy has those of its data-parallel
    coordinate, and the nodes' stores have all of them once.  others: the models of roles that start from another
    checkpoint.
    """
    tokens = run.data.train_batch_size * sequences_per_prompt(run) * run.data.max_response_length
    dp = Layout.of(run.actor.parallel, run.trainer.world_size).dp
    return ceil(tokens * _row_bytes(run, policy, others) * (per_node / dp + 1 / run.trainer.nnodes))


def output_bytes(run: RunConfig, policy: ModelConfig, others: Mapping[str, ModelConfig], tp: int) -> int:
    """Bytes of the output rows of all teachers in the loss, of one of ``tp`` tensor ranks of the policy; 0 without one.

    others: as in ``hidden_bytes``.
    """
    return -(-policy.vocab_size // tp) * _row_bytes(run, policy, others) * num_teachers(run)


def _row_bytes(run: RunConfig, policy: ModelConfig, others: Mapping[str, ModelConfig]) -> int:
    """Bytes of a hidden state, and of an output row; 0 without a teacher in the loss."""
    if not run.algorithm.distill.in_loss:
        return 0
    return others.get(TEACHER, policy).hidden_size * BYTES[run.role_config(ROLES[TEACHER]).precision]


def product_bytes(columns: int, rows: int, size: int) -> int:
    """What the loss needs of ``columns`` of both models at ``rows`` tokens: a gradient, and a block of logits."""
    return size * columns * (rows + min(rows, PRODUCT_ROWS))
