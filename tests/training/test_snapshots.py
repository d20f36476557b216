"""Snapshots: what is scored with them, that the live weights and the optimizer never notice, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from mcore_rl.config.engine import Device, Precision
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.role import Every, ExponentialAverage, Never
from mcore_rl.ground.types import StepResult, TokenScores, TrainBatch
from mcore_rl.parallel.device import detect
from mcore_rl.parallel.groups import ProcessGroups
from mcore_rl.parallel.launch import Rank
from mcore_rl.training.engine import Engine
from mcore_rl.training.offload import OffloadPart
from mcore_rl.training.snapshots import Snapshots
from tests.support import batches, engines, models
from tests.support.forked import run_ranks

KINDS: dict[str, tuple[ModelConfig, Precision]] = {
    "dense": (models.dense(tie_output=True), Precision.float32),
    "moe in bf16": (models.moe(num_layers=2), Precision.bfloat16),
}


@dataclass
class Observed:
    """One kind of model.  scores, bits, steps, num_bytes: by the moment at which they were taken."""

    num_parameter_bytes: int = 0
    scores: dict[str, TokenScores] = field(default_factory=dict)
    bits: dict[str, list[Tensor]] = field(default_factory=dict)
    steps: dict[str, StepResult] = field(default_factory=dict)
    num_bytes: dict[str, int] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)


def _batch() -> TrainBatch:
    return batches.ragged(101)


def _step(engine: Engine) -> StepResult:
    return engine.train_step(_batch(), batches.policy_loss, batches.denominators(_batch()), with_entropy=True)


def _bits(engine: Engine) -> list[Tensor]:
    return [*engines.weights_of(engine).values(), *engines.state_of(engine)]


def _fresh(groups: ProcessGroups, kind: str) -> Engine:
    model, precision = KINDS[kind]
    return engines.build(groups, model, engines.config(precision=precision))


def _observe_kind(groups: ProcessGroups, kind: str) -> Observed:
    seen = Observed()
    never = _fresh(groups, kind)
    _step(never)
    seen.steps["never swapped"], seen.bits["never swapped"] = _step(never), _bits(never)
    engine = _fresh(groups, kind)
    seen.num_parameter_bytes = sum(weight.nbytes for weight in engine.models[0].parameters())
    snapshots = engine.snapshots
    seen.num_bytes["none"] = snapshots.num_bytes()
    seen.scores["start"] = engine.score(_batch())
    snapshots.take("reference")
    seen.num_bytes["one"], seen.names["one"] = snapshots.num_bytes(), snapshots.names()
    _step(engine)
    seen.scores["live"], seen.bits["live"] = engine.score(_batch()), _bits(engine)
    seen.scores["reference"] = engine.score(_batch(), snapshot="reference")
    seen.bits["after reference"], seen.scores["live again"] = _bits(engine), engine.score(_batch())
    snapshots.take("old")
    seen.num_bytes["two"], seen.names["two"] = snapshots.num_bytes(), snapshots.names()
    seen.scores["old"] = engine.score(_batch(), snapshot="old")
    seen.refusals = _refusals(engine)
    seen.bits["after refusals"] = _bits(engine)
    seen.steps["swapped"], seen.bits["swapped"] = _step(engine), _bits(engine)
    seen.scores["reference again"] = engine.score(_batch(), snapshot="reference")
    snapshots.take("reference")
    seen.num_bytes["replaced"] = snapshots.num_bytes()
    seen.scores["replaced"], seen.scores["end"] = engine.score(_batch(), snapshot="reference"), engine.score(_batch())
    snapshots.drop("old")
    seen.num_bytes["dropped"], seen.names["dropped"] = snapshots.num_bytes(), snapshots.names()
    return seen


def _refusals(engine: Engine) -> dict[str, str]:
    """What each misuse says, each followed by a look at which weights are in place."""
    snapshots = engine.snapshots

    def inside(action: Callable[[], object]) -> None:
        with snapshots.swapped("reference"):
            assert snapshots.swapped_in == "reference"
            action()

    def away(action: Callable[[], object]) -> None:
        engine.memory.offload([OffloadPart.weights])
        try:
            action()
        finally:
            engine.memory.onload([OffloadPart.weights])

    def fail() -> None:
        raise ValueError("of the caller's own")

    misuses: dict[str, Callable[[], object]] = {
        "step": lambda: inside(lambda: _step(engine)),
        "take inside": lambda: inside(lambda: snapshots.take("other")),
        "drop inside": lambda: inside(lambda: snapshots.drop("reference")),
        "nested": lambda: inside(lambda: engine.score(_batch(), snapshot="old")),
        "own error": lambda: inside(fail),
        "failing score": lambda: engine.score(_batch(), temperature=-1.0, snapshot="reference"),
        "unknown": lambda: engine.score(_batch(), snapshot="critic"),
        "drop unknown": lambda: snapshots.drop("critic"),
        "take away": lambda: away(lambda: snapshots.take("other")),
        "swap away": lambda: away(lambda: inside(lambda: None)),
    }
    said = {}
    for name, misuse in misuses.items():
        try:
            misuse()
        except (AssertionError, ValueError, KeyError) as error:
            said[name] = f"{type(error).__name__}: {error}"
        assert snapshots.swapped_in is None, name
    return said


def _observe(rank: Rank) -> dict[str, Observed]:
    with engines.world(rank), engines.groups_of() as groups:
        return {kind: _observe_kind(groups, kind) for kind in KINDS}


@pytest.fixture(scope="module")
def everything(processes: None) -> dict[str, Observed]:
    return run_ranks(_observe, 1)[0]


@pytest.fixture(params=list(KINDS))
def observed(request: pytest.FixtureRequest, everything: dict[str, Observed]) -> Observed:
    return everything[request.param]


def same(observed: Observed, one: str, other: str) -> bool:
    return engines.same_bits(vars(observed.scores[one]), vars(observed.scores[other]))


def test_scores_are_those_of_the_weights_taken(observed: Observed) -> None:
    assert same(observed, "reference", "start")
    assert same(observed, "old", "live")
    assert same(observed, "reference again", "start")
    assert not same(observed, "start", "live")


def test_the_live_weights_are_back(observed: Observed) -> None:
    assert same(observed, "live again", "live")
    assert engines.same_bits(observed.bits["after reference"], observed.bits["live"])


def test_they_are_back_after_an_error_too(observed: Observed) -> None:
    assert engines.same_bits(observed.bits["after refusals"], observed.bits["live"])


def test_training_never_notices_a_swap(observed: Observed) -> None:
    assert observed.steps["swapped"] == observed.steps["never swapped"]
    assert engines.same_bits(observed.bits["swapped"], observed.bits["never swapped"])


def test_taking_again_replaces(observed: Observed) -> None:
    assert same(observed, "replaced", "end")
    assert not same(observed, "replaced", "start")


def test_bytes_and_names(observed: Observed) -> None:
    """A snapshot is the weights that the forward pass reads, in their own dtype, and nothing of the optimizer."""
    size = observed.num_parameter_bytes
    assert observed.num_bytes == {"none": 0, "one": size, "two": 2 * size, "replaced": 2 * size, "dropped": size}
    assert observed.names == {"one": ["reference"], "two": ["old", "reference"], "dropped": ["reference"]}


@pytest.mark.parametrize(
    ("misuse", "said"),
    [
        ("step", "AssertionError: a step on swapped-in weights would train the wrong model"),
        ("take inside", "AssertionError: the weights in place are those of snapshot 'reference'"),
        ("drop inside", "AssertionError: snapshot 'reference' is in place; its memory holds the live weights"),
        ("nested", "AssertionError: snapshot 'reference' is in place already"),
        ("own error", "ValueError: of the caller's own"),
        ("failing score", "AssertionError: temperature=-1.0 must be positive"),
        ("unknown", "AssertionError: no snapshot 'critic'; there are ['old', 'reference']"),
        ("drop unknown", "KeyError: 'critic'"),
        ("take away", "AssertionError: the weights are in host memory"),
        ("swap away", "AssertionError: the weights are in host memory"),
    ],
)
def test_misuse(misuse: str, said: str, observed: Observed) -> None:
    assert observed.refusals[misuse].startswith(said)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frozen_weights_move_by_hand(dtype: torch.dtype) -> None:
    """Live weights 1, then 2, then 4: an average of decay 0.75, a copy, and one that stays."""
    model = torch.nn.Linear(3, 2).to(dtype)
    snapshots = Snapshots([model], detect(Device.cpu))

    def live(value: float) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)

    live(1.0)
    for name, moves in {"mean": ExponentialAverage(0.75), "copy": Every(2), "first": Never()}.items():
        snapshots.take(name, moves)
    for value in (2.0, 4.0):
        live(value)
        for name in snapshots.moving():
            snapshots.move(name)
    assert snapshots.moving() == ["copy", "mean"], "one that stays is no part of a checkpoint"
    mean = 0.75 * (0.75 * 1 + 0.25 * 2) + 0.25 * 4
    for name, expected in {"mean": mean, "copy": 4.0, "first": 1.0}.items():
        held = snapshots.tensors(name)[id(model.weight)]
        assert held.dtype == (torch.float32 if name == "mean" else dtype) and held.unique().tolist() == [expected]
        with snapshots.swapped(name):
            assert model.weight.dtype == dtype and model.weight.unique().tolist() == [
                torch.tensor(expected, dtype=dtype)
            ]
        assert model.weight.unique().tolist() == [4.0]


def test_a_mean_keeps_what_its_weights_cannot() -> None:
    """In bfloat16, 1 + 2**-9 is 1: a mean that was rounded in each step would never arrive."""
    model = torch.nn.Linear(2, 2, bias=False).to(torch.bfloat16)
    snapshots = Snapshots([model], detect(Device.cpu))
    with torch.no_grad():
        model.weight.fill_(1.0)
        snapshots.take("mean", ExponentialAverage(1 - 2**-9))
        model.weight.fill_(2.0)
    for _ in range(4):
        snapshots.move("mean")
    held, expected = snapshots.tensors("mean")[id(model.weight)], 2 - (1 - 2**-9) ** 4
    assert held.flatten().tolist() == pytest.approx([expected] * 4, abs=1e-6) and expected > 1.007
    with snapshots.swapped("mean"):
        assert model.weight.flatten().tolist() == [torch.tensor(expected).bfloat16().item()] * 4
