"""Steps that are not finite: skipped without a trace, their cause named; a run of them ends the job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_rl.config.engine import OptimizerConfig, Schedule
from mcore_rl.ground.errors import NonFiniteError
from mcore_rl.ground.types import LossInputs, LossSums, StepResult
from mcore_rl.parallel.device import memory, reset_peak_memory
from mcore_rl.parallel.groups import ProcessGroups
from mcore_rl.parallel.launch import Rank
from mcore_rl.training.engine import Engine, Loss
from mcore_rl.training.nonfinite import FiniteWatch, NonFiniteTensor
from tests.support import batches, engines, models
from tests.support.forked import run_ranks

MODEL = models.dense()
NAN, INF = float("nan"), float("inf")
# The rate changes at every step, so that a step that was counted although it was skipped would show.
OPTIM = OptimizerConfig(lr=1e-2, lr_schedule=Schedule.linear, total_steps=10)


class _Backward(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class Poisoned:
    """``policy_loss``, but on ``rank`` the total of microbatch ``at`` goes through ``poison``."""

    def __init__(self, groups: ProcessGroups, poison: Callable[[Tensor], Tensor], rank: int, at: int) -> None:
        self.poison, self.at = poison, at if groups.rank == rank else -1
        self.calls = 0

    def __call__(self, inputs: LossInputs) -> LossSums:
        sums = batches.policy_loss(inputs)
        self.calls += 1
        return LossSums(total=self.poison(sums.total), metrics=sums.metrics) if self.calls - 1 == self.at else sums


POISONS: dict[str, Callable[[Tensor], Tensor]] = {
    "loss and gradient": lambda total: total * NAN,
    "loss alone": lambda total: total + INF,
    "gradient alone": lambda total: _Backward.apply(total, INF),  # type: ignore[no-untyped-call]
}


@dataclass
class Skipped:
    """One rank's view of a bad step, and of the good one after it; ``kept`` holds bits before and after the bad one."""

    bad: StepResult
    kept: tuple[list[Tensor], list[Tensor]]
    num_steps: int
    num_skipped: int
    good: StepResult
    after_good: list[Tensor]


@dataclass
class Observed:
    skipped: dict[str, Skipped] = field(default_factory=dict)
    undisturbed: dict[str, tuple[StepResult, list[Tensor]]] = field(default_factory=dict)
    in_a_row: list[str | None] = field(default_factory=list)


def _step(engine: Engine, loss: Loss = batches.policy_loss) -> StepResult:
    whole = batches.ragged(MODEL.vocab_size)
    mine = engines.share_of(whole, engine.groups)
    return engine.train_step(mine, loss, batches.denominators(whole), with_entropy=True)


def _bits(engine: Engine) -> list[Tensor]:
    return [*engines.weights_of(engine).values(), *engines.state_of(engine)]


def _fresh(groups: ProcessGroups, layout: str, max_nonfinite_steps: int = 3) -> Engine:
    settings = engines.config(optim=OPTIM, microbatch_tokens=32, max_nonfinite_steps=max_nonfinite_steps)
    engine = engines.build(groups, MODEL, settings, layout=layout)
    _step(engine)  # so that there are moments to lose
    return engine


def _skip(engine: Engine, loss: Loss) -> Skipped:
    assert engine.optimizer is not None
    before, bad, after = _bits(engine), _step(engine, loss), _bits(engine)
    num_steps, good = engine.optimizer.num_steps, _step(engine)
    return Skipped(bad, (before, after), num_steps, engine.num_skipped, good, _bits(engine))


def _poison_a_layer(engine: Engine, at: int) -> Callable[[], None]:
    """NaN in the backward pass of the first layer here, of one microbatch; returns what undoes it."""
    calls = iter(range(1000))

    def watch(_module: object, _inputs: object, output: tuple[Tensor, object]) -> object:
        hidden, rest = output
        return (_Backward.apply(hidden, NAN) if next(calls) == at else hidden), rest  # type: ignore[no-untyped-call]

    return engine.models[0].decoder.layers[0].register_forward_hook(watch).remove


def _observe(rank: Rank) -> Observed:
    seen = Observed()
    with engines.world(rank):
        for layout in ("", "pp=2"):
            with engines.groups_of(layout) as groups:
                engine = _fresh(groups, layout)
                seen.undisturbed[layout] = _step(engine), _bits(engine)
                for name, poison in POISONS.items():
                    bad = Poisoned(groups, poison, rank=1, at=1)
                    seen.skipped[f"{layout} {name}"] = _skip(_fresh(groups, layout), bad)
        with engines.groups_of("pp=2") as groups:
            engine = _fresh(groups, "pp=2")
            undo = _poison_a_layer(engine, at=2) if groups.coords.pp == 0 else lambda: None
            before, bad = _bits(engine), _step(engine)
            undo()
            after, num_steps, good = _bits(engine), engine.optimizer.num_steps, _step(engine)
            seen.skipped["pp=2 layer"] = Skipped(
                bad, (before, after), num_steps, engine.num_skipped, good, _bits(engine)
            )
        with engines.groups_of() as groups:
            seen.in_a_row = _in_a_row(_fresh(groups, "", max_nonfinite_steps=3))
    return seen


def _in_a_row(engine: Engine) -> list[str | None]:
    """Two bad steps, a good one, then bad ones until the end; the reasons, and the last error."""
    said = []
    for at in (0, 1, None, 0, 1, 2):
        poisoned = Poisoned(engine.groups, POISONS["loss and gradient"], rank=0, at=-2 if at is None else at)
        try:
            said.append(_step(engine, poisoned).skipped)
        except NonFiniteError as error:
            said.append(str(error))
    return said


@pytest.fixture(scope="module")
def observed(processes: None) -> list[Observed]:
    return run_ranks(_observe, 2)


CASES = [f"{layout} {name}" for layout in ("", "pp=2") for name in POISONS] + ["pp=2 layer"]


@pytest.mark.parametrize("case", CASES)
def test_a_skipped_step_leaves_no_trace(case: str, observed: list[Observed]) -> None:
    for rank in observed:
        seen = rank.skipped[case]
        assert seen.bad.skipped is not None and seen.num_skipped == 1
        assert engines.same_bits(*seen.kept), "weights or moments changed"
        assert seen.num_steps == 1, "the schedule went on"


@pytest.mark.parametrize("case", CASES)
def test_the_next_step_is_as_if_nothing_had_happened(case: str, observed: list[Observed]) -> None:
    for rank in observed:
        seen, (undisturbed, bits) = rank.skipped[case], rank.undisturbed[case.partition(" ")[0]]
        assert undisturbed.skipped is None and undisturbed.lr == OPTIM.lr * 0.9
        assert seen.good == undisturbed
        assert engines.same_bits(seen.after_good, bits)
        assert not engines.same_bits(seen.kept[1], bits), "the good step moved nothing"


@pytest.mark.parametrize(
    ("case", "where"),
    [
        (" loss and gradient", "the loss of microbatch 1 on rank 1 (dp1 pp0 tp0 cp0 ep0)"),
        (" loss alone", "the loss of microbatch 1 on rank 1 (dp1 pp0 tp0 cp0 ep0)"),
        (" gradient alone", "the gradient at the output of pipeline chunk 0 of microbatch 1 on rank 1 (dp1 pp0 "),
        ("pp=2 loss and gradient", "the loss of microbatch 1 on rank 1 (dp0 pp1 tp0 cp0 ep0)"),
        ("pp=2 loss alone", "the loss of microbatch 1 on rank 1 (dp0 pp1 tp0 cp0 ep0)"),
        ("pp=2 gradient alone", "the gradient at the output of pipeline chunk 1 of microbatch 1 on rank 1 (dp0 pp1 "),
        ("pp=2 layer", "the gradient at the embedding of microbatch 2 on rank 0 (dp0 pp0 tp0 cp0 ep0)"),
    ],
)
def test_the_cause_is_named(case: str, where: str, observed: list[Observed]) -> None:
    """The same words on every rank: role, what, microbatch, rank and coordinates."""
    reasons = {rank.skipped[case].bad.skipped for rank in observed}
    assert len(reasons) == 1
    (reason,) = reasons
    assert reason is not None and reason.startswith("actor: ") and where in reason


def test_what_follows_from_the_cause_is_counted(observed: list[Observed]) -> None:
    reason = observed[0].skipped["pp=2 loss and gradient"].bad.skipped
    assert reason is not None
    assert "(and 3 that follow from it or stand beside it)" in reason  # two chunks' outputs and the embedding


def test_a_run_of_bad_steps_ends_the_job_on_every_rank(observed: list[Observed]) -> None:
    """A good step starts the count again; the error tells all three."""
    assert observed[0].in_a_row == observed[1].in_a_row
    first, second, good, *again, error = observed[0].in_a_row
    assert first is not None and second is not None and good is None
    assert all(reason is not None for reason in again)
    assert error is not None and error.startswith("3 steps in a row were skipped:")
    for microbatch in range(3):
        assert f"  - actor: non-finite the loss of microbatch {microbatch} on rank 0 (dp0 " in error
    assert "max_nonfinite_steps" in error


def _fail(rank: Rank) -> None:
    with engines.world(rank), engines.groups_of() as groups:
        engine = _fresh(groups, "", max_nonfinite_steps=1)
        _step(engine, Poisoned(groups, POISONS["loss and gradient"], rank=1, at=0))


def test_the_error_reaches_the_parent_as_itself(processes: None) -> None:
    with pytest.raises(NonFiniteError, match=r"the loss of microbatch 0 on rank 1 \(dp1 "):
        run_ranks(_fail, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_watching_costs_no_memory(dtype: torch.dtype) -> None:
    """The gradient of the logits is the largest tensor of a step; ``isfinite`` would copy it nearly twice."""
    nobody: Any = None
    watch, gradient = FiniteWatch(nobody, [], num_chunks=1), torch.zeros(32 * 2**20, dtype=dtype)
    watch.loss(gradient, 0)  # whatever a first call allocates
    reset_peak_memory(engines.CPU)
    before = memory(engines.CPU).allocated_bytes
    watch.loss(gradient, 0)
    assert memory(engines.CPU).peak_bytes - before < gradient.nbytes / 8


def test_findings_sort_by_cause() -> None:
    """A loss before any gradient; of gradients, what the backward pass met first; then the earlier microbatch."""
    ordered = [
        NonFiniteTensor(False, 0, 2, 1, "the loss", ""),
        NonFiniteTensor(False, 0, 3, 0, "the loss", ""),
        NonFiniteTensor(True, 0, 1, 3, "the gradient at the output of the last chunk", ""),
        NonFiniteTensor(True, 1, 0, 0, "the gradient at the output of the first chunk", ""),
        NonFiniteTensor(True, 2, 0, 0, "the gradient at the embedding", ""),
    ]
    shuffled = [ordered[index] for index in (3, 1, 4, 0, 2)]
    assert sorted(shuffled) == ordered
