"""What the layout gate computes: models, problems on them, and a case: one way to compute a problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mcore_rl.config.algorithm import CorrectionLevel, Divergence
from mcore_rl.config.engine import AuxLoss, Dispatcher, Recompute
from mcore_rl.config.lora import ALL_LINEAR
from mcore_rl.config.model import ModelConfig, RopeConfig, RopeType
from mcore_rl.config.preference import PreferenceLoss
from mcore_rl.config.reward_training import RewardLoss
from mcore_rl.config.role import Head
from tests.support import models, picture_models


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is computed; its single-process result is the reference of all its cases.

    model: a name in ``MODELS``.  aux, z: mixture-of-experts losses.  head: what the model ends in.
    replay: experts are dictated, at random, to all tokens but some.
    lora: adapters are trained, and nothing else: on all linear layers, or on those that ``adapts`` names.
    weighed: decoupled PPO, whose weights are of tokens or of whole responses (``old / mu``).
    preference: a loss of pairs, or of responses and their labels.
    scores: a reward model's loss, of pairs of answers or of labelled ones; with ``Head.value``.
    steps: of an answer its steps have the labels.
    outcomes: the loss of a process reward model, of whole responses.
    distill: the divergence from a teacher with another hidden size, beside a policy loss.
    muon: matrices move by Muon.
    prompted: sequences are samples of a few prompts.
    frozen_tower: the tower of a model that sees pictures does not learn.
    """

    model: str
    aux: AuxLoss = AuxLoss.none
    z: float = 0.0
    temperature: float = 1.0
    head: Head = Head.lm
    replay: bool = False
    lora: bool = False
    adapts: tuple[str, ...] = (ALL_LINEAR,)
    weighed: CorrectionLevel | None = None
    preference: PreferenceLoss | None = None
    scores: RewardLoss | None = None
    distill: Divergence | None = None
    steps: bool = False

    @property
    def paired(self) -> bool:
        """Whether sequences have pairs."""
        return self.preference is not None or (self.scores is not None and not self.steps)

    outcomes: bool = False
    muon: bool = False
    prompted: bool = False
    frozen_tower: bool = False

    @property
    def pictured(self) -> bool:
        """Whether sequences have pictures."""
        return MODELS[self.model].vision is not None


@dataclass(frozen=True, kw_only=True)
class Case:
    """How it is computed.  microbatch_tokens: packed up to so many tokens; microbatch_sequences: or unpacked, so many.

    filled: microbatches are padded to their budget.
    shared: prompts are computed once for their samples.
    overlap: gradients are reduced during the backward pass, in small buckets, and the optimizer's state comes back from
    host memory during the second step.  megatron: fields that are passed on.
    sabotage: a deliberate mistake (tests/support/sabotage.py), to see that the gate sees it.
    """

    problem: Problem
    layout: str = ""
    world_size: int = 1
    microbatch_tokens: int | None = 64
    microbatch_sequences: int | None = None
    recompute: Recompute = Recompute.none
    dispatcher: Dispatcher = Dispatcher.alltoall
    pipeline_layers: tuple[int, ...] | None = None
    overlap: bool = False
    filled: bool = False
    shared: bool = False
    megatron: tuple[tuple[str, Any], ...] = ()
    sabotage: str | None = None

    def __str__(self) -> str:
        problem, parts = self.problem, [self.problem.model, f"w{self.world_size}"]
        parts += [self.layout.replace(",", "-")] if self.layout else []
        parts.append("whole" if self.microbatch_tokens == WHOLE else f"packed{self.microbatch_tokens}")
        if self.microbatch_sequences is not None:
            parts[-1] = f"unpacked{self.microbatch_sequences}"
        parts += [self.recompute.value] if self.recompute is not Recompute.none else []
        parts += ["allgather"] if self.dispatcher is Dispatcher.allgather else []
        parts += ["overlap"] if self.overlap else []
        parts += ["filled"] if self.filled else []
        parts += ["shared"] if self.shared else []
        parts += [name for name, _ in self.megatron]
        parts += [f"aux-{problem.aux.value}"] if problem.aux is not AuxLoss.none else []
        parts += ["z"] if problem.z else []
        parts += ["critic"] if problem.head is Head.value else []
        parts += ["replay"] if problem.replay else []
        parts += ["-".join(("lora", *problem.adapts[problem.adapts == (ALL_LINEAR,) :]))] if problem.lora else []
        parts += [f"weighed-{problem.weighed.value}"] if problem.weighed is not None else []
        parts += [problem.preference.value] if problem.preference is not None else []
        parts += [problem.scores.value] if problem.scores is not None else []
        parts += ["steps"] if problem.steps else []
        parts += ["muon"] if problem.muon else []
        parts += ["outcomes"] if problem.outcomes else []
        parts += ["prompted"] if problem.prompted else []
        parts += ["frozen"] if problem.frozen_tower else []
        parts += [f"distill-{problem.distill.value}"] if problem.distill is not None else []
        parts += ["layers" + "".join(map(str, self.pipeline_layers))] if self.pipeline_layers else []
        parts += [f"t{problem.temperature}"] if problem.temperature != 1.0 else []
        return "-".join(parts).replace("=", "")


WHOLE = 4096  # a budget that takes the whole batch in one microbatch

MODELS: dict[str, ModelConfig] = {
    "dense": models.dense(),
    "tied": models.dense(tie_output=True, qkv_bias=True),
    "qk_norm": models.dense(qk_norm=True),
    "moe": models.moe(),
    # With tp beyond the key/value heads, ranks hold parts of heads; biases too.
    "one_key_head": models.dense(num_query_groups=1, qkv_bias=True),
    "qwen_moe": models.moe(norm_topk_prob=False, qk_norm=True),
    "qwen2_moe": models.qwen2_moe(),
    "qwen2_moe_norm": models.qwen2_moe((1,), norm_topk_prob=True),
    "deepseek_v3": models.deepseek_v3(),
    "deepseek_v3_yarn": models.deepseek_v3(q_lora_rank=None, yarn=True),
    "deepseek_v3_halves": models.deepseek_v3(interleaved=False, yarn=True),
    "deepseek_v2": models.deepseek_v2(),
    # Moonlight's epsilon is not the 1e-6 that transformers has for latents; one so large shows where it is.
    "moonlight": models.deepseek_v3(q_lora_rank=None, norm_epsilon=1e-2),
    "glm4_moe": models.glm4_moe(),
    "glm4_moe_lite": models.glm4_moe_lite(),
    "minimax_m2": models.minimax_m2(),
    "windowed": models.windowed(),
    "gemma2": models.gemma2(),
    "gemma3": models.gemma3(),
    "olmoe": models.olmoe(),
    "qwen3_next": models.qwen3_next(),
    "qwen3_5": models.qwen3_5(),
    "qwen3_5_moe": models.qwen3_5_moe(),
    "phi3": models.phi3(),
    "gpt_oss": models.gpt_oss(),
    "seed_oss": models.seed_oss(),
    "smollm3": models.smollm3(),
    "ernie4_5": models.ernie4_5(),
    **{family: picture_models.model(family, num_hidden_layers=4) for family in picture_models.ARCHITECTURES},
    # Sixty-four tokens of pre-training: the ramps of llama3 and yarn then lie within the 8 frequencies of a head.
    "rope_linear": models.with_rope(RopeConfig(type=RopeType.linear, factor=3.0)),
    "rope_llama3": models.with_rope(RopeConfig(type=RopeType.llama3, factor=8.0, original_max_position_embeddings=64)),
    "rope_yarn": models.with_rope(
        RopeConfig(type=RopeType.yarn, factor=4.0, original_max_position_embeddings=64, attention_factor=1.1386)
    ),
    "qwen2_yarn": models.with_rope(
        RopeConfig(
            type=RopeType.yarn,
            factor=2.5,
            original_max_position_embeddings=64,
            beta_fast=4.0,
            truncate=False,
            attention_factor=0.9,
        ),
        qkv_bias=True,
    ),
}
