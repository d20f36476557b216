"""Muon's steps by its formula in float64, by singular values; everything that is no matrix by torch's AdamW.

The gradients come from a twin engine at rate 0 that is given the same weights.  The quintic multiplies rounding of a
gradient by up to 500 where its singular values are small: of 6e-8 that leaves 3e-5 of a step.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mcore_rl.config.engine import OptimizerConfig, OptimizerKind, Schedule
from mcore_rl.parallel.launch import Rank
from mcore_rl.training.muon import orthogonal
from mcore_rl.training.optimizer import learning_rate
from tests.support import engines, models
from tests.support.forked import run_ranks
from tests.training.test_optimizer import Step, loading, norm_of, one_step

MODEL = models.moe(num_layers=2)
OPTIM = OptimizerConfig(
    optimizer=OptimizerKind.muon, lr=0.03, betas=(0.8, 0.95), eps=1e-2, weight_decay=0.5, clip_grad=0.3,
    lr_schedule=Schedule.linear, lr_warmup_steps=2, total_steps=6, min_lr_ratio=0.5,
)  # fmt: skip
TOLERANCE = 1e-4


def quintic(matrix: Tensor) -> Tensor:
    """Five times 3.4445 s - 4.775 s^3 + 2.0315 s^5 on the singular values of the matrix over its norm; float64."""
    left, values, right = torch.linalg.svd(matrix.double() / matrix.double().norm(), full_matrices=False)
    for _ in range(5):
        values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
    made: Tensor = (left * values) @ right
    return made


@pytest.mark.parametrize("shape", [(24, 24), (8, 40), (40, 8), (2, 64)])
def test_a_matrix_is_made_orthogonal(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    made = orthogonal(matrix)
    assert (made - quintic(matrix)).norm() < TOLERANCE * made.norm()
    values = torch.linalg.svdvals(made)
    assert 0.6 < float(values.min()) and float(values.max()) < 1.3
    assert (orthogonal(1e-20 * matrix) - made).norm() < TOLERANCE * made.norm(), "whatever its size"


def test_nothing_moves_along_a_gradient_that_is_zero() -> None:
    assert not orthogonal(torch.zeros(4, 6)).any()


def _observe(rank: Rank) -> list[Step]:
    steps = list[Step]()
    with engines.world(rank), engines.groups_of() as groups:
        engine = engines.build(groups, MODEL, engines.config(optim=OPTIM))
        for _ in range(4):
            before = engines.weights_of(engine)
            still = engines.config(optim=OptimizerConfig(lr=0.0, clip_grad=0.0))
            twin = engines.build(groups, MODEL, still, load=loading(before))
            one_step(twin)
            named = twin.models[0].named_parameters()
            gradients = {f"0.{name}": parameter.main_grad.clone() for name, parameter in named}
            steps.append(Step(one_step(engine), before, gradients, engines.weights_of(engine)))
    return steps


@pytest.fixture(scope="module")
def steps(processes: None) -> list[Step]:
    observed: list[Step] = run_ranks(_observe, 1)[0]
    return observed


def is_matrix(name: str, weight: Tensor) -> bool:
    return weight.dim() == 2 and not name.endswith(("word_embeddings.weight", "output_layer.weight"))


def test_matrices_move_by_the_formula_and_all_else_by_adamw(steps: list[Step]) -> None:
    matrices = {name for name, weight in steps[0].before.items() if is_matrix(name, weight)}
    assert any("router" in name for name in matrices) and any("local_experts" in name for name in matrices)
    rest = {n: torch.nn.Parameter(w.clone()) for n, w in steps[0].before.items() if n not in matrices}
    decayed = [name for name, weight in rest.items() if weight.dim() == 2]
    assert len(decayed) == 2
    reference = torch.optim.AdamW(
        [
            {"params": [rest[name] for name in decayed], "weight_decay": OPTIM.weight_decay},
            {"params": [rest[name] for name in rest if name not in decayed], "weight_decay": 0.0},
        ],
        betas=OPTIM.betas,
        eps=OPTIM.eps,
    )
    means = {name: torch.zeros_like(steps[0].before[name], dtype=torch.float64) for name in matrices}
    for index, step in enumerate(steps):
        rate, factor = learning_rate(OPTIM, index), min(1.0, OPTIM.clip_grad / norm_of(step.gradients))
        assert factor < 0.9, "else it does not show whether the clipped gradient is taken"
        for name, weight in rest.items():
            weight.data.copy_(step.before[name])
            weight.grad = step.gradients[name] * factor
        for group in reference.param_groups:
            group["lr"] = rate
        reference.step()
        for name, weight in rest.items():
            assert (step.after[name] - weight).norm() < 1e-6 * weight.norm(), (name, index)
        for name in matrices:
            gradient, before = step.gradients[name].double() * factor, step.before[name].double()
            means[name] = 0.8 * means[name] + 0.2 * gradient
            direction = quintic(0.8 * means[name] + 0.2 * gradient)
            moved = rate * 0.2 * max(direction.shape) ** 0.5 * direction
            expected = (1 - rate * OPTIM.weight_decay) * before - moved
            assert (step.after[name] - expected).norm() < TOLERANCE * moved.norm(), (name, index)


def test_the_oracle_sees_a_part_that_is_made_orthogonal_by_itself(steps: list[Step]) -> None:
    gradient = next(grad for name, grad in steps[0].gradients.items() if "linear_qkv" in name)
    whole, parts = quintic(gradient), torch.cat([quintic(half) for half in gradient.chunk(2)])
    assert (whole - parts).norm() > 0.05 * whole.norm()
