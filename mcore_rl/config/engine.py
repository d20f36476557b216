"""Settings of one role's training engine: device, precision, microbatches, recompute, optimizer, MoE loss terms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any

from mcore_rl.config.bounds import (
    Beta,
    Interval,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seed,
    Share,
    check,
)
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.ground.errors import Violation


class Device(Enum):
    """``auto`` takes the accelerator of this machine, or the CPU if there is none."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
    rocm = "rocm"


class Precision(Enum):
    """Dtype of weights and activations; bfloat16 always keeps float32 main weights, gradients and Adam moments."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class LayerSpec(Enum):
    """``auto`` takes Transformer Engine when it can be imported on an accelerator, else the local layers."""

    auto = "auto"
    local = "local"
    transformer_engine = "transformer_engine"


class SharePrompts(Enum):
    """``auto``: where that is exact, and a plan says where it is not.  ``off``: each sample computes its prompt."""

    auto = "auto"
    off = "off"


class Recompute(Enum):
    """Activation recompute (arXiv:2205.05198): ``selective`` core attention only, ``full`` every layer."""

    none = "none"
    selective = "selective"
    full = "full"


class Dispatcher(Enum):
    """How tokens are sent to experts; the names of Megatron's ``moe_token_dispatcher_type``.

    ``flex`` sends and permutes in one kernel, of DeepEP or HybridEP (``FlexBackend``), on accelerators.
    """

    allgather = "allgather"
    alltoall = "alltoall"
    flex = "flex"


class FlexBackend(Enum):
    """The kernels of ``Dispatcher.flex``; the names of Megatron's ``moe_flex_dispatcher_backend``."""

    deepep = "deepep"
    hybridep = "hybridep"


class AuxLoss(Enum):
    """The tokens over which the load of the experts is balanced.

    ``sequence``: each sequence by itself (arXiv:2412.19437, eq. 17).  ``batch``: the whole global batch
    (arXiv:2101.03961, eq. 4, with the expert counts of the full batch from a forward-only pass).  Both are the same
    under every layout.  Megatron's loss per microbatch is not, and is therefore not offered.
    """

    none = "none"
    sequence = "sequence"
    batch = "batch"


@dataclass(kw_only=True)
class MoeTrainConfig:
    """Training terms that only a mixture of experts has.

    flex_backend: see ``FlexBackend``.
    permute_fusion: tokens are put into the order of their experts by one kernel of Transformer Engine's; None: where
    its layers are used.
    aux_loss_coeff: coefficient of the load-balancing loss.  z_loss_coeff: of the router's z-loss (arXiv:2202.08906).
    """

    dispatcher: Dispatcher = Dispatcher.alltoall
    flex_backend: FlexBackend = FlexBackend.deepep
    permute_fusion: bool | None = None
    aux_loss: AuxLoss = AuxLoss.none
    aux_loss_coeff: NonNegativeFloat = 0.0
    z_loss_coeff: NonNegativeFloat = 0.0


class Schedule(Enum):
    """Learning rate after warm-up: held, or decayed to ``lr * min_lr_ratio`` at ``total_steps``."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class OptimizerKind(Enum):
    """``muon`` moves matrices along their orthogonalised momentum (arXiv:2502.16982), all else as ``adamw`` does."""

    adamw = "adamw"
    muon = "muon"


@dataclass(kw_only=True)
class OptimizerConfig:
    """AdamW or Muon with decoupled weight decay on matrices only (biases and norms are exempt).

    optimizer: see ``OptimizerKind``.
    lr: the learning rate after the warm-up.
    betas: decay rates of the two moments; of the first also the momentum of Muon.
    eps: added to the root of the second moment.
    weight_decay: the decay, which the learning rate multiplies.
    clip_grad: the largest global L2 norm of gradients; 0 is no clipping.
    lr_warmup_steps: steps of linear warm-up from 0.
    warmup_ratio: instead, the share of all steps that are warm-up, rounded up.
    total_steps: the step at which a decay ends, warm-up included; None, or 0 as before there was None: the run's last.
    allow_early_end: a decay may end before the run does.
    min_lr_ratio: the share of ``lr`` that a decay ends at.
    """

    optimizer: OptimizerKind = OptimizerKind.adamw
    lr: Share = 1e-6
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: Annotated[float, Interval("[0, 1000]")] = 0.01
    clip_grad: NonNegativeFloat = 1.0
    lr_schedule: Schedule = Schedule.constant
    lr_warmup_steps: NonNegativeInt = 0
    warmup_ratio: Annotated[float, Interval("[0, 1)", "Write 0.1, say")] = 0.0
    total_steps: NonNegativeInt | None = None
    allow_early_end: bool = False
    min_lr_ratio: Share = 0.0


@dataclass(kw_only=True)
class EngineConfig:
    """The training engine of one role.

    microbatch_tokens: pack whole sequences into microbatches of at most this many tokens per context-parallel group.
    microbatch_sequences: instead, exactly this many sequences per microbatch.  One of the two is required.
    share_prompts: a prompt is computed once for those of its samples that are in one microbatch.
    microbatch_patches: also pack at most this many patches of pictures into a microbatch, which the vision tower keeps
    activations of; None: as many as its tokens stand for, 4 a token.
    max_nonfinite_steps: the run stops after this many steps in a row that were skipped for non-finite gradients.
    seed: of initial weights that are not loaded from a checkpoint.
    overlap_grad_reduce: gradients are summed over data-parallel ranks, bucket by bucket, while the backward pass of the
    last microbatch computes others; None: on accelerators.
    overlap_offload: where engines share the devices, the optimizer's state comes back from host memory while the first
    minibatch computes, and leaves while the engines receive weights if the plan has room for it then; None: on
    accelerators.
    gradient_accumulation_fusion: the product that makes a weight's gradient adds it to the float32 one; None: on
    accelerators.
    tp_comm_overlap: matrix products overlap with the communication of tensor ranks, in buffers of Transformer Engine's,
    which have one shape: every microbatch is padded to ``microbatch_tokens``.
    megatron: fields of Megatron's TransformerConfig by name, as far as ``megatron_fields.py`` allows them.
    """

    device: Device = Device.auto
    precision: Precision = Precision.bfloat16
    layer_spec: LayerSpec = LayerSpec.auto
    recompute: Recompute = Recompute.none
    microbatch_tokens: PositiveInt | None = None
    microbatch_sequences: PositiveInt | None = None
    share_prompts: SharePrompts = SharePrompts.off
    microbatch_patches: PositiveInt | None = None
    max_nonfinite_steps: PositiveInt = 3
    seed: Seed = 1234
    overlap_grad_reduce: bool | None = None
    overlap_offload: bool | None = None
    gradient_accumulation_fusion: bool | None = None
    tp_comm_overlap: bool = False
    megatron: dict[str, Any] = field(default_factory=dict)
    moe: MoeTrainConfig = field(default_factory=MoeTrainConfig)
    optim: OptimizerConfig = field(default_factory=OptimizerConfig)

    def overlaps_reduction(self, *, accelerator: bool) -> bool:
        """``overlap_grad_reduce``, resolved.  accelerator: whether the engine computes on one."""
        return accelerator if self.overlap_grad_reduce is None else self.overlap_grad_reduce

    def overlaps_offload(self, *, accelerator: bool) -> bool:
        """``overlap_offload``, resolved.  accelerator: whether the engine computes on one."""
        return accelerator if self.overlap_offload is None else self.overlap_offload


def engine_violations(engine: EngineConfig) -> list[Violation]:
    """Every violation within ``engine``, not looking at a model, a layout or data."""
    return check(engine, [engine_rules])


def engine_rules(engine: EngineConfig, prefix: str = "") -> Iterator[Violation]:
    """The contradictions between settings of ``engine``.  prefix: of their keys, with its dot."""
    yield from _optimizer_rules(engine.optim, prefix)
    if engine.layer_spec is LayerSpec.transformer_engine and (problem := muon_problem(engine.optim.optimizer)):
        remedy = f"Write {prefix}layer_spec=auto or local, or adamw"
        yield Violation(f"{prefix}optim.optimizer", engine.optim.optimizer.value, problem, remedy)
    if (engine.microbatch_tokens is None) == (engine.microbatch_sequences is None):
        yield Violation(
            f"{prefix}microbatch_tokens",
            engine.microbatch_tokens,
            f"either this or microbatch_sequences (={engine.microbatch_sequences}) sets the size, and not both",
            "Write microbatch_tokens=16384 for packed microbatches, or microbatch_sequences=1",
        )
    if (engine.moe.aux_loss is AuxLoss.none) != (engine.moe.aux_loss_coeff == 0):
        yield Violation(
            f"{prefix}moe.aux_loss_coeff",
            engine.moe.aux_loss_coeff,
            f"contradicts moe.aux_loss={engine.moe.aux_loss.value}",
            "Write moe.aux_loss=sequence with a positive coefficient, or moe.aux_loss=none with 0",
        )


def muon_problem(optimizer: OptimizerKind) -> str | None:
    """Why ``optimizer`` needs the local layers, or None."""
    if optimizer is not OptimizerKind.muon:
        return None
    return "Muon does not know how Transformer Engine's layers are cut over tensor ranks"


def _optimizer_rules(optim: OptimizerConfig, prefix: str) -> Iterator[Violation]:
    if optim.warmup_ratio and optim.lr_warmup_steps:
        problem = f"and {prefix}optim.lr_warmup_steps={optim.lr_warmup_steps} both say how long warm-up is"
        yield Violation(f"{prefix}optim.warmup_ratio", optim.warmup_ratio, problem, "Write one of them")
    decays = optim.lr_schedule is not Schedule.constant
    if decays and optim.total_steps and optim.total_steps <= optim.lr_warmup_steps:
        yield Violation(
            f"{prefix}optim.total_steps",
            optim.total_steps,
            f"a {optim.lr_schedule.value} schedule must end after its {optim.lr_warmup_steps} steps of warm-up",
            f"Write more than {optim.lr_warmup_steps}, or leave it out: it follows from the run",
        )


def why_not_shared(
    engine: EngineConfig, model: ModelConfig, parallel: ParallelConfig, *, transformer_engine: bool
) -> str | None:
    """Why an engine computes the prompt of several samples once for each; None: once for all.

    transformer_engine: whether its layers are used.
    """
    reasons = {
        "share_prompts=off": engine.share_prompts is SharePrompts.off,
        "microbatches are not packed (microbatch_sequences)": engine.microbatch_tokens is None,
        f"parallel.cp={parallel.cp} cuts each sequence": parallel.cp > 1,
        "Transformer Engine's attention takes whole sequences; layer_spec=local takes branches": transformer_engine,
        "layers of linear attention carry a state from token to token": model.linear_attention is not None,
        "the model sees pictures, which stand in prompts": model.vision is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
