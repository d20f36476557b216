"""Rehearsals of small models: memory beside what torch's allocator gave in a real step, bytes by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mcore_rl.algorithms.policy import ActorLoss
from mcore_rl.algorithms.role_loss import RoleLoss
from mcore_rl.config.algorithm import DistillConfig, Divergence, KlPenalty
from mcore_rl.config.algorithm_object import REFERENCE
from mcore_rl.config.engine import EngineConfig, LayerSpec, Precision, Recompute
from mcore_rl.config.lora import LoraConfig
from mcore_rl.config.model import ModelConfig, MoeConfig
from mcore_rl.config.parallel import ParallelConfig, parse_layout
from mcore_rl.config.role import Head
from mcore_rl.config.roles import AdaptedConfig
from mcore_rl.families.flops import visible_pairs
from mcore_rl.families.registry import model_of
from mcore_rl.ground.errors import ConfigError
from mcore_rl.ground.types import Denominators, LossInputs, LossSums, TrainBatch
from mcore_rl.parallel.launch import Rank
from mcore_rl.parallel.layout import Layout
from mcore_rl.planning.training import lora_of
from mcore_rl.rehearsal.bends import _Attention
from mcore_rl.rehearsal.host_reads import refused
from mcore_rl.rehearsal.ledger import Ledger, MemoryKind
from mcore_rl.rehearsal.meter import DeviceMeter
from mcore_rl.rehearsal.rank import (
    TRAIN,
    TRAIN_AGAIN,
    RehearsedRank,
    RehearsedTeachers,
    _batch,
    microbatch_lengths,
    ranks_of_stages,
    rehearse,
    rehearsed_microbatches,
)
from mcore_rl.training.attention_kernels import takes_groups, varlen_attn
from mcore_rl.training.distillation import Teacher
from tests.support import batches, engines, models, picture_models
from tests.support.adapters import adapter_table
from tests.support.forked import run_ranks
from tests.support.settings import actor_config

WIDE = models.dense(
    num_layers=4, hidden_size=256, ffn_hidden_size=640, num_attention_heads=8, num_query_groups=4, head_dim=32,
    vocab_size=2048, max_position_embeddings=512,
)  # fmt: skip
MOE = MoeConfig(num_experts=4, top_k=2, ffn_hidden_size=320)
EXPERTS = replace(WIDE, moe=MOE)
TEACHERS = RehearsedTeachers(count=1, hidden_size=WIDE.hidden_size, precision=Precision.float32, soft_cap=None)
LONGEST, TOKENS = 256, 512
MANY_TOKENS = 2048


class PolicyLoss(RoleLoss):
    """``batches.policy_loss`` as the loss of a role."""

    def __call__(self, inputs: LossInputs) -> LossSums:
        return batches.policy_loss(inputs)


def part(model: ModelConfig, layout: str = "", world_size: int = 1, rank: int = 0, **changes: Any) -> RehearsedRank:
    settings = dict(
        role="actor",
        model=model,
        engine=EngineConfig(precision=Precision.bfloat16, microbatch_tokens=TOKENS, layer_spec=LayerSpec.local),
        parallel=parse_layout(layout),
        world_size=world_size,
        rank=rank,
        head=Head.lm,
        accelerator=True,
        device_bytes=80 << 30,
        tokens=TOKENS,
        longest=LONGEST,
        num_microbatches=8,
        imbalance=1.0,
        loss=PolicyLoss(),
        with_entropy=True,
    )
    return RehearsedRank(**(settings | changes))


def rehearsals(rank: Rank, parts: list[RehearsedRank]) -> list[Ledger]:
    return [rehearse(each).ledger for each in parts]


def ledger_of(each: RehearsedRank) -> Ledger:
    return run_ranks(rehearsals, 1, ([each],), timeout_s=240)[0][0]


# ---- memory ----


def allocated(
    rank: Rank, cases: list[tuple[ModelConfig, EngineConfig]], losses: list[RoleLoss] | None = None
) -> list[list[int]]:
    """The peak of two training steps of each case by torch's own allocator, as its profiler hears it.

    losses: of each case; None: ``PolicyLoss`` of all.
    """
    peaks = []
    with engines.world(rank):
        for (model, settings), loss in zip(cases, losses or [PolicyLoss()] * len(cases), strict=True):
            with engines.groups_of() as groups:
                lengths = microbatch_lengths(MANY_TOKENS, LONGEST, 1)
                size = sum(lengths)
                mask = torch.ones(size, dtype=torch.bool)
                mask[::LONGEST] = False
                zeros = torch.zeros(size)
                batch = TrainBatch(
                    lengths_S=tuple(lengths), tokens_T=torch.zeros(size, dtype=torch.int64), mask_T=mask,
                    old_logprobs_T=zeros, advantages_T=zeros + 1,
                    teacher_hidden_MH=torch.randn(int(mask.sum()), model.hidden_size), teacher_scored_T=mask,
                )  # fmt: skip
                counts = Denominators(loss=float(size), tokens=size, sequences=len(lengths))
                lora = lora_of(settings)
                table = None if lora is None else adapter_table(model, lora)
                engine = engines.build(groups, model, settings, adapters=table)
                engine.teacher = Teacher((torch.randn(model.vocab_size, model.hidden_size),), None)
                engine.snapshots.take(REFERENCE)
                step = partial(
                    engine.train_step, batch, loss, counts, with_entropy=True,
                    kl_to=REFERENCE if loss.with_full_kl else None, distill=loss.distill,
                )  # fmt: skip
                peaks.append([highest(memory_events(step)) for _ in range(2)])
                del engine, step
    return peaks


def memory_events(work: Callable[[], object]) -> list[int]:
    """Bytes that the allocator gave (positive) or took back, in order."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [each for each in profiler.profiler.kineto_results.events() if each.name() == "[memory]"]
    return [each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())]


def highest(changes: list[int]) -> int:
    level = most = 0
    for change in changes:
        level += change
        most = max(most, level)
    return most


CASES = [
    (model, EngineConfig(precision=Precision.float32, microbatch_tokens=MANY_TOKENS, recompute=recompute))
    for model in (WIDE, replace(WIDE, moe=replace(MOE, top_k=4)))  # all experts: as many rows for each
    for recompute in (Recompute.none, Recompute.full)
]
CASES.append((WIDE, AdaptedConfig(precision=Precision.float32, microbatch_tokens=MANY_TOKENS, lora=LoraConfig(rank=8))))


@pytest.mark.tier("full")
def test_memory_is_what_torchs_allocator_gives_in_a_real_step(processes: None) -> None:
    """What a step takes at its highest beyond what was there, in the first and in a later one (moments are there).

    So many tokens that the highest is in backward: in the optimizer's step, gloo copies what it sends, unseen by torch.
    """
    measured = run_ranks(allocated, 1, (CASES,), timeout_s=240)[0]
    parts = [
        part(model, engine=settings, accelerator=False, num_microbatches=1, tokens=MANY_TOKENS)
        for model, settings in CASES
    ]
    ledgers = run_ranks(rehearsals, 1, (parts,), timeout_s=240)[0]
    for case, steps, ledger in zip(CASES, measured, ledgers, strict=True):
        for phase, taken in zip(ledger.phases[-2:], steps, strict=True):
            begin = sum(ledger.by_kind(phase.begin).values())
            counted = ledger.peak(phase).num_bytes - begin
            assert counted == pytest.approx(taken, rel=0.01), (case, phase.name)


HEAD = replace(WIDE, vocab_size=8192, num_layers=2)  # the most is taken where logits are
OVER_VOCABULARY = {
    "forward_kl": ActorLoss(actor_config(), DistillConfig(divergence=Divergence.forward_kl)),
    "jensen_shannon": ActorLoss(actor_config(), DistillConfig(divergence=Divergence.jensen_shannon)),
    "full KL": ActorLoss(actor_config(use_kl_loss=True, kl_loss_type=KlPenalty.full)),
}


@pytest.mark.tier("full")
def test_memory_of_losses_over_the_vocabulary_is_torchs(processes: None) -> None:
    """But for what an accelerator has in host memory: frozen logits, and the teacher's rows, which are copied."""
    settings = CASES[0][1]
    losses = [PolicyLoss(), *OVER_VOCABULARY.values()]
    measured = run_ranks(allocated, 1, ([(HEAD, settings)] * len(losses), losses), timeout_s=240)[0]
    common = dict(engine=settings, accelerator=False, num_microbatches=1, tokens=MANY_TOKENS)
    parts = [part(HEAD, loss=loss, teachers=TEACHERS if loss.distill else None, **common) for loss in losses]
    ledgers = run_ranks(rehearsals, 1, (parts,), timeout_s=240)[0]
    a_row = 4 * HEAD.vocab_size
    trained = MANY_TOKENS - MANY_TOKENS // LONGEST
    copied, kept = -HEAD.hidden_size * a_row, trained * a_row
    elsewhere = {"forward_kl": copied, "jensen_shannon": copied, "full KL": kept}
    for name, steps, ledger in zip(["", *OVER_VOCABULARY], measured, ledgers, strict=True):
        for phase, taken in zip(ledger.phases[-2:], steps, strict=True):
            begin = sum(ledger.by_kind(phase.begin).values())
            counted = ledger.peak(phase).num_bytes - begin + elsewhere.get(name, 0)
            assert counted == pytest.approx(taken, rel=0.01), (name, phase.name)
    logits = MANY_TOKENS * a_row
    most = {name: steps[0] / logits for name, steps in zip(["", *OVER_VOCABULARY], measured, strict=True)}
    assert most["forward_kl"] < most[""] + 1.5, "one gradient more, and a block of the teacher's logits"


SEEN = ((16, 16),) * (MANY_TOKENS // LONGEST)


def seeing(family: str) -> RehearsedRank:
    """Each sequence with a picture of 256 patches, all in one microbatch, by the CPU's kernels."""
    _, model = model_of(picture_models.config(family), pictures=True)
    settings = actor_config(precision=Precision.float32, microbatch_tokens=MANY_TOKENS, recompute=Recompute.full)
    return part(
        model, engine=settings, accelerator=False, num_microbatches=1, tokens=MANY_TOKENS, pictures=SEEN,
        learns_to_see=True,
    )  # fmt: skip


def allocated_seeing(rank: Rank, parts: list[RehearsedRank]) -> list[list[int]]:
    """As ``allocated``, of models that see."""
    peaks = []
    with engines.world(rank):
        for each in parts:
            with engines.groups_of() as groups:
                engine = engines.build(groups, each.model, each.engine)
                batch = _batch(each, groups, 1)
                counts = Denominators(loss=float(MANY_TOKENS), tokens=MANY_TOKENS, sequences=len(batch.lengths_S))
                step = partial(engine.train_step, batch, each.loss, counts, with_entropy=True)
                peaks.append([highest(memory_events(step)) for _ in range(2)])
                del engine, step
    return peaks


@pytest.mark.tier("full")
def test_memory_of_models_that_see_is_torchs(processes: None) -> None:
    """The tower of transformers, whose blocks are computed again, in a real step; and the rehearsal sees it."""
    parts = [seeing(family) for family in ("qwen2_5_vl", "qwen3_vl")]
    measured = run_ranks(allocated_seeing, 1, (parts,), timeout_s=240)[0]
    blind = [replace(each, pictures=()) for each in parts]
    ledgers = run_ranks(rehearsals, 1, ([*parts, *blind],), timeout_s=240)[0]
    for steps, ledger, without in zip(measured, ledgers[:2], ledgers[2:], strict=True):
        for phase, taken in zip(ledger.phases[-2:], steps, strict=True):
            begin = sum(ledger.by_kind(phase.begin).values())
            assert ledger.peak(phase).num_bytes - begin == pytest.approx(taken, rel=0.01), phase.name
        last = [each.peak(each.phases[-1]).num_bytes for each in (ledger, without)]
        assert last[0] > 1.05 * last[1]


def test_a_rehearsal_marks_state_by_kind(processes: None) -> None:
    """Of bfloat16 weights: 2 bytes an element, 4 of gradient, 12 of main weight and moments over the data ranks."""
    ledger = ledger_of(part(WIDE, "tp=2,pp=2", world_size=8))
    by_kind = ledger.peak(ledger.phases[-1]).by_kind
    assert by_kind[MemoryKind.gradients] == 4 * ELEMENTS
    assert by_kind[MemoryKind.optimizer] == 12 * ELEMENTS / 2
    assert by_kind[MemoryKind.parameters] - 2 * ELEMENTS < 1024, "and the frequencies of the rotary embedding"


# ---- operations and communication ----

# By hand, for rank 0 of tp=2, pp=2, dp=2: the embedding and two of four layers.
QKV, PROJECTION, FC1, FC2 = 256 * 256, 128 * 256, 640 * 256, 320 * 256
LAYER = QKV + PROJECTION + FC1 + FC2 + 2 * 256
ELEMENTS = 1024 * 256 + 2 * LAYER
HIDDEN_BYTES = 2 * TOKENS * 256


@pytest.mark.tier("test")
def test_operations_and_bytes_are_those_by_hand(processes: None) -> None:
    ledger = ledger_of(part(WIDE, "tp=2,pp=2", world_size=8))
    matrices = 2 * TOKENS * 2 * (LAYER - 2 * 256)
    attention = 2 * (8 // 2) * (32 + 32) * 2 * visible_pairs(LONGEST) * 2
    microbatches = 2  # stage 0 of two keeps two
    assert ledger.flops(TRAIN) == ledger.flops(TRAIN_AGAIN) == microbatches * (3 * matrices + 3.5 * attention)

    sent = {
        (key.group, key.operation, key.per_step): total for key, total in ledger.traffic.items() if key.phase == TRAIN
    }
    # Sequence parallelism, a layer: forward gathers before two linears and scatters after two; backward gathers their
    # inputs and the gradients of the other two, and scatters gradients of two inputs.  The embedding: once each.
    gathers, scatters = microbatches * (2 * 6 + 1), microbatches * (2 * 4 + 1)
    assert (sent["tp", "all-gather", False].calls, sent["tp", "reduce-scatter", False].calls) == (gathers, scatters)
    assert sent["tp", "all-gather", False].payload == gathers * HIDDEN_BYTES
    assert sent["tp", "reduce-scatter", False].wire == scatters * HIDDEN_BYTES // 2
    assert sent["pp", "send", False].wire == microbatches * HIDDEN_BYTES // 2
    assert sent["pp", "receive", False].payload == microbatches * HIDDEN_BYTES // 2
    assert sent["dp", "reduce-scatter", True].payload == 4 * ELEMENTS
    assert sent["dp", "all-gather", True].wire == 2 * ELEMENTS // 2
    assert sent["tp", "all-reduce", True].payload == 4 * (2 * 2 * 256), "gradients of norms, of two layers"


def test_rows_of_experts_are_as_many_as_were_asked_for(processes: None) -> None:
    """Of T * K rows over 2 expert ranks, this one gets 1.5 halves: its two experts multiply 1.5 times as many."""
    even, busy = (
        ledger_of(part(EXPERTS, "ep=2", world_size=2, imbalance=imbalance)).operations for imbalance in (1.0, 1.5)
    )
    key = (TRAIN, False, "_grouped_mm.default")
    experts = 3 * 2 * (TOKENS * 2) * 3 * 256 * 320 * 4  # forward and backward of three matrices, four layers
    assert busy[key] - even[key] == experts / 2


# ---- reads of the device ----


def reading(rank: Rank, parts: list[RehearsedRank]) -> list[list[str]]:
    """What is refused of each, as it is and with a read in the hot path."""
    from mcore_rl.training.microbatch import Microbatch

    as_it_is = [refused(rehearse(each).ledger) for each in parts]
    real = Microbatch.at_targets

    def at_targets(self: Microbatch, field_T: torch.Tensor | None) -> torch.Tensor | None:
        picked = real(self, field_T)
        return picked if picked is None or bool((picked == picked).all()) else None

    at_targets.__code__ = at_targets.__code__.replace(co_filename=real.__code__.co_filename)  # a line of the project
    Microbatch.at_targets = at_targets  # type: ignore[method-assign]
    return [*as_it_is, *(refused(rehearse(each).ledger) for each in parts)]


def test_a_new_read_of_the_device_is_refused(processes: None) -> None:
    dense, experts, spoilt, _ = run_ranks(reading, 1, ([part(WIDE), part(EXPERTS)],), timeout_s=240)[0]
    assert dense == experts == []
    assert len(spoilt) == 2, "of both training steps"
    assert all("mcore_rl/training/microbatch.py" in line and "at_targets: item" in line for line in spoilt)


def reads_of_experts(ledger: Ledger) -> int:
    """Reads in layers with experts, of one pass."""
    places = ("/moe/", "grouped_product.py", "grouped_experts.py")
    return sum(
        count
        for read, count in ledger.reads.items()
        if read.phase == TRAIN and any(place in read.path for place in places)
    )


def test_no_layer_with_experts_waits_where_tokens_stay(processes: None) -> None:
    """In float32 no kernel takes all experts at once: four layers learn their numbers of rows, once a microbatch."""
    with_biases = models.gpt_oss(hidden_size=256, head_dim=64, max_position_embeddings=512)
    for model in (EXPERTS, with_biases):
        assert reads_of_experts(ledger_of(part(model))) == 0
    exact = EngineConfig(precision=Precision.float32, microbatch_tokens=TOKENS, layer_spec=LayerSpec.local)
    microbatches = 1  # of a stage that is alone
    assert reads_of_experts(ledger_of(part(EXPERTS, engine=exact))) == 4 * microbatches


# ---- how much is rehearsed ----


@pytest.mark.parametrize(
    ("layout", "stage", "there_are", "count"),
    [
        ("", 0, 6, 1),
        ("pp=4", 0, 6, 4),
        ("pp=4", 1, 6, 3),
        ("pp=4", 3, 6, 1),
        ("pp=4", 0, 2, 2),
        ("pp=2,vpp=2", 0, 40, 4),  # 2 + 2 + 1 chunks in rounds of 4
        ("pp=2,vpp=2", 1, 40, 2),
        ("pp=2,vpp=2", 0, 2, 2),
    ],
)
def test_enough_microbatches_for_what_a_stage_keeps(layout: str, stage: int, there_are: int, count: int) -> None:
    shape = Layout.of(parse_layout(layout), 8)
    assert rehearsed_microbatches(shape, stage, there_are) == count


def test_heads_share_keys_and_values_as_in_torchs_kernel() -> None:
    assert takes_groups(_Attention(DeviceMeter(FakeTensorMode())).packed) == takes_groups(varlen_attn)


def test_a_microbatch_is_full() -> None:
    assert microbatch_lengths(8192, 4608, 2) == [4608, 3584]
    assert microbatch_lengths(8193, 1024, 2) == [1024] * 8
    assert microbatch_lengths(1, 1024, 8) == [8]


def test_ranks_of_the_first_middle_and_last_stage() -> None:
    assert ranks_of_stages(ParallelConfig(), 4) == [0]
    assert ranks_of_stages(parse_layout("tp=2,pp=2"), 8) == [0, 4]
    assert ranks_of_stages(parse_layout("tp=2,pp=8"), 32) == [0, 16, 28]


def test_a_rank_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="the run has 1 ranks"):
        rehearse(part(WIDE, rank=3))
