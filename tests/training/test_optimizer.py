"""The schedule by its formula; steps against torch.optim.AdamW on the same gradients; what bfloat16 weights keep.

The gradients come from a twin engine at rate 0 that is given the same weights.  Both sides are float32 and do the same
elementwise operations in another order: the bound is 1e-6 of a tensor's norm, ten roundings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from mcore_rl.config.engine import OptimizerConfig, Precision, Schedule
from mcore_rl.ground.types import StepResult
from mcore_rl.parallel.groups import ProcessGroups
from mcore_rl.parallel.launch import Rank
from mcore_rl.training.engine import Engine
from mcore_rl.training.optimizer import learning_rate
from tests.support import batches, engines, models
from tests.support.forked import run_ranks

TOLERANCE = 1e-6
MODEL = models.dense(num_layers=2, qkv_bias=True)
# A large epsilon and decay, so that the clipping and the exemptions show in the weights.
OPTIM = OptimizerConfig(
    lr=0.03, betas=(0.8, 0.95), eps=1e-2, weight_decay=0.5, clip_grad=0.3,
    lr_schedule=Schedule.linear, lr_warmup_steps=2, total_steps=6, min_lr_ratio=0.5,
)  # fmt: skip
CLIPS = {"clipped": 0.3, "never reached": 100.0, "off": 0.0}
SMALL_RATE, MANY = 1e-3, 8

Named = dict[str, Tensor]


# ---- the schedule ----

COSINE = OptimizerConfig(
    lr=2.0, lr_schedule=Schedule.cosine, lr_warmup_steps=4, total_steps=12, min_lr_ratio=0.25
)  # fmt: skip
LINEAR = replace(COSINE, lr_schedule=Schedule.linear)
CONSTANT = replace(COSINE, lr_schedule=Schedule.constant, total_steps=None)


@pytest.mark.parametrize("optim", [CONSTANT, LINEAR, COSINE])
def test_warm_up_rises_from_the_first_step_to_the_last_of_it(optim: OptimizerConfig) -> None:
    assert [learning_rate(optim, step) for step in range(4)] == [0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize(
    ("optim", "expected"),
    [
        (CONSTANT, {4: 2.0, 5: 2.0, 12: 2.0, 10**9: 2.0}),
        (LINEAR, {4: 2.0, 6: 1.625, 8: 1.25, 11: 0.6875, 12: 0.5, 13: 0.5, 10**9: 0.5}),
        (COSINE, {4: 2.0, 6: 0.5 + 1.5 * (1 + math.sqrt(0.5)) / 2, 8: 1.25, 12: 0.5, 13: 0.5, 10**9: 0.5}),
        (replace(LINEAR, lr_warmup_steps=0), {0: 2.0, 6: 1.25, 12: 0.5}),
        (replace(COSINE, lr_warmup_steps=0, min_lr_ratio=0.0), {0: 2.0, 6: 1.0, 12: 0.0, 13: 0.0}),
        (replace(CONSTANT, lr_warmup_steps=0), {0: 2.0}),
    ],
)
def test_after_warm_up(optim: OptimizerConfig, expected: dict[int, float]) -> None:
    assert {step: learning_rate(optim, step) for step in expected} == pytest.approx(expected, rel=1e-12)


# ---- what one process does ----


@dataclass
class Step:
    """before, gradients, after: of each parameter.  gradients: before clipping."""

    result: StepResult
    before: Named
    gradients: Named
    after: Named


@dataclass
class Bf16:
    """Weights, and their float32 main weights, after each step; the first are those before any."""

    weights: list[Named]
    main: list[Named]
    dtypes: set[torch.dtype]


@dataclass
class Observed:
    steps: dict[str, list[Step]] = field(default_factory=dict)
    first_moments: dict[str, float] = field(default_factory=dict)
    num_state_tensors: list[int] = field(default_factory=list)
    at_rest: dict[Precision, tuple[Named, Named, int]] = field(default_factory=dict)
    bf16: Bf16 | None = None


def one_step(engine: Engine) -> StepResult:
    batch = batches.ragged(MODEL.vocab_size)
    return engine.train_step(batch, batches.policy_loss, batches.denominators(batch), with_entropy=True)


def _steps(groups: ProcessGroups, clip_grad: float) -> tuple[list[Step], Engine]:
    engine = engines.build(groups, MODEL, engines.config(optim=replace(OPTIM, clip_grad=clip_grad)))
    still = OptimizerConfig(lr=0.0, clip_grad=0.0)
    steps = []
    for _ in range(4):
        before = engines.weights_of(engine)
        twin = engines.build(groups, MODEL, engines.config(optim=still), load=loading(before))
        one_step(twin)
        gradients = {f"0.{name}": parameter.main_grad.clone() for name, parameter in twin.models[0].named_parameters()}
        steps.append(Step(one_step(engine), before, gradients, engines.weights_of(engine)))
    return steps, engine


def loading(weights: Named) -> Callable[[object], None]:
    def load(chunks: object) -> None:
        for name, parameter in chunks[0].named_parameters():  # type: ignore[index]
            parameter.copy_(weights[f"0.{name}"])

    return load


def _main_weights(engine: Engine) -> Named:
    """On one data-parallel rank a shard is the whole parameter, laid out flat."""
    named = engine.models[0].named_parameters()
    return {f"0.{name}": parameter.main_param.detach().view_as(parameter).clone() for name, parameter in named}


def _bf16(groups: ProcessGroups) -> Bf16:
    optim = OptimizerConfig(lr=SMALL_RATE, weight_decay=0.0, clip_grad=0.0)
    engine = engines.build(groups, MODEL, engines.config(precision=Precision.bfloat16, optim=optim))
    seen = Bf16([engines.weights_of(engine)], [_main_weights(engine)], set())
    for _ in range(MANY):
        one_step(engine)
        seen.weights.append(engines.weights_of(engine))
        seen.main.append(_main_weights(engine))
    seen.dtypes = {tensor.dtype for tensor in engines.state_of(engine)}
    return seen


def _observe(rank: Rank) -> Observed:
    seen = Observed()
    with engines.world(rank), engines.groups_of() as groups:
        for name, clip_grad in CLIPS.items():
            seen.steps[name], engine = _steps(groups, clip_grad)
        untouched = engines.build(groups, MODEL)
        seen.num_state_tensors = [len(engines.state_of(each)) for each in (untouched, engine)]
        for precision in Precision:
            still = engines.config(precision=precision, optim=replace(OPTIM, lr=0.0))
            engine = engines.build(groups, MODEL, still)
            before = engines.weights_of(engine)
            for _ in range(3):
                assert one_step(engine).lr == 0.0
            seen.at_rest[precision] = (before, engines.weights_of(engine), engine.optimizer.num_steps)
        seen.bf16 = _bf16(groups)
    return seen


@pytest.fixture(scope="module")
def observed(processes: None) -> Observed:
    return run_ranks(_observe, 1)[0]


def is_exempt(name: str, weight: Tensor) -> bool:
    """Norms and biases are not decayed."""
    return name.endswith("bias") or "norm" in name


def norm_of(gradients: Named) -> float:
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))


@pytest.mark.parametrize("clip", CLIPS)
def test_steps_are_those_of_adamw(clip: str, observed: Observed) -> None:
    """Four steps, through warm-up and into the decay of the rate; torch's optimizer keeps its own moments."""
    steps, limit = observed.steps[clip], CLIPS[clip]
    weights = {name: torch.nn.Parameter(weight.clone()) for name, weight in steps[0].before.items()}
    exempt = {name for name, weight in weights.items() if is_exempt(name, weight)}
    assert {"0.decoder.final_layernorm.weight", "0.decoder.layers.1.self_attention.linear_qkv.bias"} < exempt
    assert "0.embedding.word_embeddings.weight" not in exempt
    groups = [
        {"params": [weights[name] for name in weights if name not in exempt], "weight_decay": OPTIM.weight_decay},
        {"params": [weights[name] for name in exempt], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, betas=OPTIM.betas, eps=OPTIM.eps)
    for index, step in enumerate(steps):
        norm = norm_of(step.gradients)
        factor = min(1.0, limit / norm) if limit > 0 else 1.0
        assert (factor < 0.9) == (clip == "clipped"), "the gradients are not as large as this test needs"
        for name, weight in weights.items():
            weight.data.copy_(step.before[name])
            weight.grad = step.gradients[name] * factor
        for group in reference.param_groups:
            group["lr"] = learning_rate(OPTIM, index)
        reference.step()
        assert step.result.lr == learning_rate(OPTIM, index) and step.result.skipped is None
        for name, weight in weights.items():
            assert (step.after[name] - weight).norm() < TOLERANCE * weight.norm(), (name, index)
            assert not torch.equal(step.after[name], step.before[name]), name


@pytest.mark.parametrize("clip", CLIPS)
def test_the_norm_is_that_before_clipping(clip: str, observed: Observed) -> None:
    for step in observed.steps[clip]:
        assert step.result.grad_norm == pytest.approx(norm_of(step.gradients), rel=TOLERANCE)


def test_clipping_changes_the_step(observed: Observed) -> None:
    """Adam divides most of a factor out again; only the large epsilon lets the tests above see clipping at all."""
    clipped, off = observed.steps["clipped"][0].after, observed.steps["off"][0].after
    assert all((clipped[name] - off[name]).norm() > 100 * TOLERANCE * off[name].norm() for name in off)


def test_moments_come_with_the_first_step(observed: Observed) -> None:
    assert observed.num_state_tensors[1] == 3 * observed.num_state_tensors[0] > 0


@pytest.mark.parametrize("precision", list(Precision))
def test_rate_zero_changes_no_bit_of_the_weights(precision: Precision, observed: Observed) -> None:
    before, after, num_steps = observed.at_rest[precision]
    assert engines.same_bits(before, after)
    assert num_steps == 3


def test_bf16_keeps_its_state_in_float32(observed: Observed) -> None:
    assert observed.bf16 is not None
    assert observed.bf16.dtypes == {torch.float32}
    for weights, main in zip(observed.bf16.weights, observed.bf16.main, strict=True):
        assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
        assert {weight.dtype for weight in main.values()} == {torch.float32}


def test_bf16_weights_are_the_main_weights_rounded(observed: Observed) -> None:
    assert observed.bf16 is not None
    for weights, main in zip(observed.bf16.weights, observed.bf16.main, strict=True):
        assert engines.same_bits(weights, {name: weight.bfloat16() for name, weight in main.items()})


def test_steps_too_small_for_bf16_accumulate(observed: Observed) -> None:
    """Of weights in [0.5, 2) half a unit in the last place is 2^-9 = 0.002 or more; Adam's first step is at most the
    rate, 0.001.  Eight of them in one direction are not lost."""
    assert observed.bf16 is not None
    norms = [name for name in observed.bf16.weights[0] if "norm" in name]
    start, once, often = (torch.cat([observed.bf16.weights[step][name] for name in norms]) for step in (0, 1, MANY))
    assert start.min() >= 0.5 and start.max() < 2
    assert torch.equal(once, start)
    main = torch.cat([observed.bf16.main[1][name] for name in norms])
    assert (main != start.float()).float().mean() > 0.9
    assert (often != start).float().mean() > 0.5
