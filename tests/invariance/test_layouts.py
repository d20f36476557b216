"""The gate: no result depends on the layout, the microbatches, recompute or the dispatcher.

One seeded batch of ragged sequences and one seeded set of weights per problem.  Every case computes log-probs,
entropies (or values), then takes two optimizer steps, and must agree with the single-process, one-sequence-at-a-time
result.

Tolerances, all float32 with rounding unit 6e-8:
- scores, loss, gradient norm: 1e-5 relative.  A layout changes the order of sums of about a hundred products a layer;
  4 layers, forward and backward, were seen to differ by up to 1.5e-6.
- weights: 1e-5 of each tensor's norm after two steps; seen up to 2.5e-6.
- updates (weights minus start): 1e-4 of each tensor's update.  Adam divides every gradient by its own size, so an
  element whose gradient is nearly 0 turns rounding of 1e-7 into a visible share of its tiny step; seen up to 1.4e-5.
  A wrong gradient shows as 1e-2 or more.
Experts are chosen by comparing scores: the seeds are such that no two of a token are within rounding of each other.
"""

from __future__ import annotations

import pytest
import torch
from _pytest.mark import ParameterSet

from tests.invariance.cases import SABOTAGED, all_cases, each_layout_once, few_of, single_process
from tests.invariance.problems import Case, Problem
from tests.support.engine_runs import Result, run_cases, starting_weights
from tests.support.forked import run_ranks

CASES = all_cases()
QUICK = frozenset(each_layout_once(CASES))
FEW = frozenset(few_of(QUICK))
RELATIVE = 1e-5
UPDATE_RELATIVE = 1e-4


def differences(result: Result, reference: Result, start: dict[str, torch.Tensor]) -> list[str]:
    """Everything in which ``result`` differs by more than the tolerance, largest first."""
    excesses = []

    def compare(what: str, error: float, bound: float) -> None:
        if not error <= bound:
            excesses.append((error / bound, f"{what}: {error:.1e} > {bound:.0e}"))

    for name, expected in reference.scores.items():
        scale = float(expected.abs().max())
        compare(name, float((result.scores[name] - expected).abs().max()) / scale, RELATIVE)
    for step, (loss, norm) in enumerate(zip(reference.loss, reference.grad_norm, strict=True)):
        compare(f"loss of step {step}", abs(result.loss[step] - loss) / abs(loss), RELATIVE)
        compare(f"gradient norm of step {step}", abs(result.grad_norm[step] - norm) / norm, RELATIVE)
        for name, expected in reference.metrics[step].items():
            compare(
                f"{name} of step {step}", abs(result.metrics[step][name] - expected) / max(abs(expected), 1e-6), 1e-4
            )
    for key, expected in reference.gradients.items():
        error = float((result.gradients[key] - expected).norm())
        size = float(expected.norm()) or 1.0  # of an expert that no token took: nothing
        compare(f"gradient of {key}", error / size, RELATIVE)
    for key, expected in reference.weights.items():
        error = float((result.weights[key] - expected).norm())
        compare(key, error / float(expected.norm()), RELATIVE)
        update = float((expected - start[key]).norm())
        if update > 0:
            compare(f"update of {key}", error / update, UPDATE_RELATIVE)
        else:  # a buffer or a frozen weight, which training leaves alone
            compare(f"change of {key}", error, 0.0)
    return [text for _, text in sorted(excesses, reverse=True)]


class Gate:
    """Runs the cases that were selected, all of one world size at their first use."""

    def __init__(self, cases: list[Case]) -> None:
        self.cases = cases
        self.starts = {problem: starting_weights(problem) for problem in {case.problem for case in cases}}
        self._results: dict[Case, Result] = {}

    def _run(self, cases: list[Case]) -> None:
        starts = {case.problem: self.starts[case.problem] for case in cases}
        world_size = cases[0].world_size
        results = run_ranks(run_cases, world_size, (cases, starts), threads_per_rank=1, timeout_s=600)[0]
        self._results.update(zip(cases, results, strict=True))

    def result(self, case: Case) -> Result:
        if case not in self._results:
            self._run([other for other in self.cases if other.world_size == case.world_size and not other.sabotage])
        return self._results[case]

    def sabotaged(self, case: Case) -> Result | str:
        if case not in self._results:
            self._run([other for other in self.cases if other.sabotage])
        return self._results[case]

    def reference(self, problem: Problem) -> Result:
        case = single_process(problem)
        if case not in self._results:
            self._run([single_process(problem) for problem in self.starts])
        return self._results[case]


@pytest.fixture(scope="module")
def gate(request: pytest.FixtureRequest, processes: None) -> Gate:
    selected = [item.callspec.params["case"] for item in request.session.items if item.fspath == request.node.fspath]
    return Gate(list(dict.fromkeys(selected)))


def tier_of_case(case: Case) -> str:
    if case in FEW:
        return "test"
    return "ci" if case in QUICK or case.sabotage else "full"


def tiered(cases: list[Case]) -> list[ParameterSet]:
    return [pytest.param(case, marks=pytest.mark.tier(tier_of_case(case))) for case in cases]


@pytest.mark.parametrize("case", tiered(CASES), ids=str)
def test_result_is_that_of_a_single_process(case: Case, gate: Gate) -> None:
    excesses = differences(gate.result(case), gate.reference(case.problem), gate.starts[case.problem])
    assert not excesses, f"{case} differs:\n  " + "\n  ".join(excesses[:20])


@pytest.mark.parametrize("case", tiered(SABOTAGED), ids=lambda case: case.sabotage)
def test_gate_sees_a_mistake(case: Case, gate: Gate) -> None:
    result = gate.sabotaged(case)
    if isinstance(result, str):
        assert "than its replica" in result, result
    else:
        excesses = differences(result, gate.reference(case.problem), gate.starts[case.problem])
        assert excesses, f"{case.sabotage} went unseen"
