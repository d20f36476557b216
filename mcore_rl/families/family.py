"""A model family: the reader of its Hugging Face configuration, and the two tables of its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mcore_rl.config.model import ModelConfig, VisionConfig
from mcore_rl.families.fields import Fields
from mcore_rl.families.rules import Rule
from mcore_rl.families.stacks import Stack


@dataclass(frozen=True)
class Tower:
    """How the vision tower of a family is read.

    read: makes the ``VisionConfig`` of vision_config's fields and the language model.  interleaved: see
    ``MropeConfig``; transformers' class takes no other.
    """

    read: Callable[[Fields, ModelConfig], VisionConfig]
    interleaved: bool


@dataclass(frozen=True)
class Family:
    """One model family.

    architectures, model_type: as in ``config.json``; together they decide the family.  other_model_types: what
    checkpoints of the same architecture and the same fields write instead (Kimi-K2).
    read: makes the ``ModelConfig``; it takes every field that could change a number, or lists why it may be ignored.
    weights: Megatron's tensors.  rollout: vLLM's tensors.
    rollout_without_latent: vLLM's tensors if latent attention is off (``VLLM_MLA_DISABLE``); for families that have it.
    stacks: the tensors of its checkpoints that hold all experts of a layer.
    ignored: Hugging Face names (``{l}`` any layer, ``{e}`` any expert) of tensors that a checkpoint may hold and that
    are not trained.
    extra_layers: a checkpoint may hold layers beyond ``num_hidden_layers`` (multi-token prediction); they are left out.
    mxfp4: a checkpoint may have its experts in mxfp4, which reading dequantises.
    readers: the names in ``config.json`` that transformers' or vLLM's code of the model reads; other fields are noted
    and change nothing.  None: those of ``readership``; a family that is not there refuses what ``read`` does not take.
    tower: of a family whose models see pictures; ``read`` is then of the text part.
    """

    name: str
    architectures: tuple[str, ...]
    model_type: str
    read: Callable[[Fields], ModelConfig]
    weights: tuple[Rule, ...]
    rollout: tuple[Rule, ...]
    rollout_without_latent: tuple[Rule, ...] = ()
    other_model_types: tuple[str, ...] = ()
    stacks: tuple[Stack, ...] = ()
    ignored: tuple[str, ...] = ()
    extra_layers: bool = False
    mxfp4: bool = False
    readers: frozenset[str] | None = None
    tower: Tower | None = None
