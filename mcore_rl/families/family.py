"""What a family is: how its Hugging Face configuration reads, and the two tables that say where its weights go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mcore_rl.config.model import ModelConfig
from mcore_rl.families.fields import Fields
from mcore_rl.families.rules import Rule


@dataclass(frozen=True)
class Family:
    """One model family.

    architectures, model_type: as in ``config.json``; together they decide the family.  read: the ``ModelConfig`` of a
    configuration; takes every field that could change a number, or says why it may be ignored.  weights: Megatron's
    tensors.  rollout: vLLM's.  rollout_without_latent: those where latent attention is off (``VLLM_MLA_DISABLE``), of a
    family that has it.  ignored: Hugging Face names (``{l}`` any layer, ``{e}`` any expert) that may stand in a
    checkpoint and hold no weight that is trained.  extra_layers: layers beyond ``num_hidden_layers`` may stand in a
    checkpoint (multi-token prediction) and are left out.  block_fp8: checkpoints come in block-wise fp8 too, which
    loading turns back.
    """

    name: str
    architectures: tuple[str, ...]
    model_type: str
    read: Callable[[Fields], ModelConfig]
    weights: tuple[Rule, ...]
    rollout: tuple[Rule, ...]
    rollout_without_latent: tuple[Rule, ...] = ()
    ignored: tuple[str, ...] = ()
    extra_layers: bool = False
    block_fp8: bool = False
