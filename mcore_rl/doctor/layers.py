"""Checks of layers: under every axis, and Transformer Engine's, they compute what local layers in one process do."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mcore_rl.config.engine import EngineConfig, LayerSpec, Precision
from mcore_rl.config.parallel import parse_layout
from mcore_rl.doctor.checks import (
    THOROUGH,
    TRANSFORMER_ENGINE,
    TWO_RANKS,
    Diagnosis,
    HealthCheck,
    Subject,
    Verdict,
)
from mcore_rl.doctor.tiny_task import write_model
from mcore_rl.ground.types import TrainBatch
from mcore_rl.parallel.device import Platform, device_of
from mcore_rl.parallel.launch import Rank, run_ranks
from mcore_rl.parallel.layout import Layout
from mcore_rl.parallel.phase import phase

if TYPE_CHECKING:
    from mcore_rl.training.engine import Engine

LAYOUTS = ("tp=2", "cp=2", "ep=2")  # of two processes; tp is with sequence parallelism
# Mean and largest difference of log-probs in nats, as tests/gpu/test_parity.py has them: rounding of activations to
# bfloat16's 8 bits some ten times a layer; in float32 another order of sums.
TOLERANCE = {Precision.float32: (1e-5, 1e-4), Precision.bfloat16: (0.015, 0.06)}


def sample_batch(vocab_size: int) -> TrainBatch:
    """Ragged sequences with an even number of tokens each, so that every layout takes them."""
    random = torch.Generator().manual_seed(7)
    lengths = (16, 40, 8, 64, 24, 32)
    tokens_T = torch.randint(0, vocab_size, (sum(lengths),), generator=random)
    mask_T = torch.ones(sum(lengths), dtype=torch.bool)
    mask_T[[sum(lengths[:index]) for index in range(len(lengths))]] = False
    return TrainBatch(lengths_S=lengths, tokens_T=tokens_T, mask_T=mask_T)


def loaded_engine(
    rank: int,
    num_ranks: int,
    platform: Platform,
    directory: Path,
    layout: str,
    precision: Precision,
    spec: LayerSpec,
    *,
    trainable: bool,
) -> Engine:
    """An engine over Megatron's groups for ``layout``, with the weights of the model in ``directory``."""
    # Megatron, in the ranks alone: whoever starts them need not wait for it.
    from mcore_rl.checkpoints.convert import open_hf
    from mcore_rl.checkpoints.load import load_hf
    from mcore_rl.parallel.groups import init_groups
    from mcore_rl.training.engine import Engine
    from mcore_rl.weights.table import Table

    warnings.simplefilter("ignore")  # Megatron's advice about layouts that are meant so
    parallel = parse_layout(layout)
    groups = init_groups(Layout.of(parallel, num_ranks), platform, device_of(platform, rank), seed=0)
    config = EngineConfig(device=platform.kind, precision=precision, layer_spec=spec, microbatch_tokens=512)
    checkpoint, plain = open_hf(directory)
    with checkpoint:
        engine = Engine("actor", plain.model, parallel, config, groups, platform, trainable=trainable)
        table = Table(plain.family, plain.model, parallel, num_ranks)
        engine.load_weights(partial(load_hf, checkpoint=checkpoint, table=table, rank=rank))
    return engine


def score_under(
    rank: Rank,
    platform: Platform,
    directory: Path,
    layouts: tuple[str, ...],
    precision: Precision,
    spec: LayerSpec,
    routing_TLK: Tensor | None,
) -> list[tuple[Tensor, Tensor]]:
    """(log-probs, chosen experts) of ``sample_batch`` under each of ``layouts``; the same on every rank.

    routing_TLK: the experts to take; None: the router's choice.  Rounding alone would send some tokens elsewhere.
    """
    from mcore_rl.parallel.groups import destroy_groups

    rank.init_process_group(platform, timeout_s=120.0)
    scores = []
    for layout in layouts:
        with phase("layers", spec=spec.value, layout=layout or "one process"):
            engine = loaded_engine(
                rank.rank, rank.world_size, platform, directory, layout, precision, spec, trainable=False
            )
            batch = replace(sample_batch(engine.model.vocab_size), routing_TLK=routing_TLK)
            result = engine.score(batch, with_entropy=False, record_routing=True)
            assert result.logprobs_T is not None and result.routing_TLK is not None
            scores.append((result.logprobs_T.cpu(), result.routing_TLK.cpu()))
            del engine
            destroy_groups()
    return scores


def layer_diagnosis(name: str, reference_T: Tensor, scores: dict[str, Tensor], precision: Precision) -> Diagnosis:
    """scores: by layout.  FAIL where log-probs differ by more than rounding can."""
    mean_limit, worst_limit = TOLERANCE[precision]
    errors = {layout: (values - reference_T).abs() for layout, values in scores.items()}
    wrong = [
        layout
        for layout, error in errors.items()
        if not (error.mean().item() <= mean_limit and error.max().item() <= worst_limit)  # NaN is wrong too
    ]
    shown = ", ".join(f"{layout} {error.max().item():.1e}" for layout, error in errors.items())
    return Diagnosis(
        check=name,
        verdict=Verdict.FAIL if wrong else Verdict.PASS,
        measured=f"largest difference of log-probs: {shown} nats",
        expected=f"at most {worst_limit:g}, in the mean {mean_limit:g} ({precision.value})",
        remedy=f"{', '.join(wrong)} computes something else: try actor.layer_spec=local, and report it"
        if wrong
        else "",
        numbers={
            f"logprob_difference_{layout.replace('=', '')}": error.max().item() for layout, error in errors.items()
        },
    )


def _layers(subject: Subject, limit_s: float, name: str, spec: LayerSpec, precision: Precision) -> Iterator[Diagnosis]:
    directory = write_model(subject.directory / "layers")

    def score(world: int, layouts: tuple[str, ...], spec: LayerSpec, routing_TLK: Tensor | None) -> Any:
        args = (subject.platform, directory, layouts, precision, spec, routing_TLK)
        return run_ranks(score_under, world, args, timeout_s=limit_s / 3)[0]

    ((reference_T, routing_TLK),) = score(1, ("",), LayerSpec.local, None)
    scores: dict[str, Tensor] = {}
    if spec is not LayerSpec.local:
        ((scores["one process"], _),) = score(1, ("",), spec, routing_TLK)
    if subject.num_ranks > 1:
        of_layouts = score(2, LAYOUTS, spec, routing_TLK)
        scores |= {layout: logprobs_T for layout, (logprobs_T, _) in zip(LAYOUTS, of_layouts, strict=True)}
    yield layer_diagnosis(name, reference_T, scores, precision)


CHECKS = (
    HealthCheck(
        name="layers",
        about="local layers under tp with SP, cp and ep against one process",
        limit_s=240,
        run=partial(_layers, name="layers", spec=LayerSpec.local, precision=Precision.float32),
        needs=(THOROUGH, TWO_RANKS),
    ),
    HealthCheck(
        name="Transformer Engine",
        about="its packed layers, also under tp with SP, cp and ep, against the local ones",
        limit_s=300,
        needs=(THOROUGH, TRANSFORMER_ENGINE),
        run=partial(
            _layers, name="Transformer Engine", spec=LayerSpec.transformer_engine, precision=Precision.bfloat16
        ),
    ),
)
