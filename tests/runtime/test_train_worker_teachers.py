"""Workers with the weights of two teachers: what each sequence is told is what its own teacher says.

Two ranks hold a dense model twice (dp=2), a mixture whose experts they share (ep=2), and two tensor ranks.  Checkpoints
are read as a run reads them, sequences assigned as a step assigns them, and transformers in float64 is asked of each
teacher alone.  Tolerances are those of ``tests/training/test_distillation.py``: a few layers in float32.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.algorithms.policy import policy_loss
from mcore_rl.config.algorithm import DistillConfig, Divergence
from mcore_rl.config.engine import Precision
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.parallel import parse_layout
from mcore_rl.config.role import Head
from mcore_rl.config.role_table import TEACHER_HIDDEN, TEACHER_SCORED
from mcore_rl.config.roles import snapshot_of
from mcore_rl.controller.step.updates import assignments
from mcore_rl.ground.types import TAUGHT_BY, StepResult, TrainBatch
from mcore_rl.parallel.launch import Rank
from mcore_rl.runtime.shard import WorkerInput
from mcore_rl.runtime.train_worker import TrainWorker
from mcore_rl.runtime.worker_values import RoleSpec
from mcore_rl.training.distillation import Teacher
from tests.support import batches, engines, full_weights, hf_reference, models
from tests.support.forked import run_ranks
from tests.support.settings import actor_config

POLICY = models.dense(num_layers=2)
MODELS = {"dense": models.dense(vocab_size=POLICY.vocab_size + 7), "mixture": models.moe(vocab_size=POLICY.vocab_size)}
LAYOUTS = {"dense": ("", "tp=2"), "mixture": ("ep=2", "")}
SEEDS = (2, 3)  # of the two teachers
NAMES = ("teacher.path", "openai/gsm8k", "math")  # the last two have one teacher
NUMBERS = (0, 1, 1)
TAUGHT = (0, 2, 0, 0, 0, 0, 0, 0, 0, 0)  # the second teaches one sequence, fewer than there are ranks
MIXED = (0, 1, 2, 0, 1, 0, 2, 2, 0, 1)
TEMPERATURE, COEF, BETA = 0.7, 0.5, 0.3
POLICY_LAYOUTS = ("tp=2", "cp=2", "")
CONFIGS = [
    DistillConfig(coef=COEF, divergence=kind, jsd_beta=BETA) for kind in Divergence if kind is not Divergence.drawn
]


@dataclass
class Found:
    """Of one rank.  told: by model, layout and names, log-probs of sequences.  trained: by divergence and layout."""

    told: dict[tuple[str, str, tuple[int, ...]], dict[int, Tensor]] = field(default_factory=dict)
    hidden: dict[int, Tensor] = field(default_factory=dict)
    trained: dict[tuple[Divergence, str], StepResult] = field(default_factory=dict)


def worker_of(directory: Path, layout: str, groups: object, head: Head) -> TrainWorker:
    made = TrainWorker.__new__(TrainWorker)
    made.platform, made.rank, made.world_size = engines.CPU, dist.get_rank(), dist.get_world_size()
    made.groups = groups  # type: ignore[assignment]
    made.spec = RoleSpec(
        role="teacher", directory=directory / "0", engine=engines.config(), parallel=parse_layout(layout), head=head,
        trains=False, shares_device=True, beside={"teacher_1": directory / "1"},
    )  # fmt: skip
    made.build()
    return made


def told(worker: TrainWorker, names: tuple[int, ...], *, hidden: bool) -> dict[int, Tensor]:
    """The log-probs or hidden states of each sequence, joined over the ranks."""
    batch, coords = batches.ragged(POLICY.vocab_size), worker.groups.coords
    taught = assignments(batch.lengths_S, np.array([NUMBERS[name] for name in names]), worker.groups.layout.dp)
    own = [of_ranks[coords.dp] for of_ranks in taught.values()]
    snapshots = [snapshot_of(teacher) for teacher in taught]
    given = WorkerInput([replace(batch.select(members), routing_TLK=None) for members in own], None)
    makes = (TEACHER_HIDDEN, TEACHER_SCORED) if hidden else ("told_T",)
    output = worker.score(given, makes, TEMPERATURE, snapshots)
    gathered = [b""] * dist.get_world_size()
    members = [sequence for batch in own for sequence in batch]
    mine = [] if output.shard is None else output.shard.fields["teacher_hidden_MH" if hidden else "told_T"]
    dist.all_gather_object(gathered, pickle.dumps(list(zip(members, mine, strict=bool(mine)))))
    parts: dict[int, Tensor] = {}
    for sequence, part in (each for of_rank in map(pickle.loads, gathered) for each in of_rank):
        again = torch.from_numpy(part.copy())
        if sequence in parts:
            torch.testing.assert_close(parts[sequence], again, atol=1e-5, rtol=0)
        parts[sequence] = again
    return parts


def train(directory: Path, layout: str, hidden: dict[int, Tensor], config: DistillConfig) -> StepResult:
    with engines.groups_of(layout) as groups:
        policy = hf_reference.full_weights(hf_reference.build(POLICY, seed=1), POLICY)
        engine = engines.build(groups, POLICY, layout=layout, load=partial(full_weights.load_full, weights=policy))
        directories = [directory / str(number) for number in range(2)]
        engine.teacher = Teacher.load(directories, Precision.float32, POLICY, groups, engines.CPU, NUMBERS)
        batch = taught_batch(hidden)
        loss = replace(policy_loss(actor_config()), teacher=config, taught_by=NAMES)
        return engine.train_step(
            engines.share_of(batch, groups), loss, batches.denominators(batch), temperature=TEMPERATURE, distill=config
        )


def taught_batch(hidden: dict[int, Tensor]) -> TrainBatch:
    batch = batches.ragged(POLICY.vocab_size)
    assert batch.advantages_T is not None
    return replace(
        batch, advantages_T=torch.zeros_like(batch.advantages_T), teacher_scored_T=batch.mask_T,
        teacher_hidden_MH=torch.cat([hidden[sequence] for sequence in range(len(batch.lengths_S))]),
        extra_S={TAUGHT_BY: torch.tensor(MIXED, dtype=torch.float32)},
    )  # fmt: skip


def on_ranks(rank: Rank, directory: Path) -> Found:
    with engines.world(rank):
        results = Found()
        for name, layouts in LAYOUTS.items():
            for layout in layouts:
                with engines.groups_of(layout) as groups:
                    worker = worker_of(directory / name, layout, groups, Head.lm)
                    for names in (TAUGHT, MIXED):
                        results.told[name, layout, names] = told(worker, names, hidden=False)
        with engines.groups_of("") as groups:
            results.hidden = told(worker_of(directory / "dense", "", groups, Head.hidden), MIXED, hidden=True)
        for layout in POLICY_LAYOUTS:
            for config in CONFIGS:
                results.trained[config.divergence, layout] = train(directory / "dense", layout, results.hidden, config)
        return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, processes: None) -> list[Found]:
    directory = tmp_path_factory.mktemp("teachers")
    for name, model in MODELS.items():
        for number, seed in enumerate(SEEDS):
            hf_reference.build(model, seed=seed).save_pretrained(directory / name / str(number))
    return run_ranks(partial(on_ranks, directory=directory), 2, timeout_s=900)


def sequences() -> list[tuple[Tensor, Tensor]]:
    batch = batches.ragged(POLICY.vocab_size)
    return list(zip(*(torch.split(x, batch.lengths_S) for x in (batch.tokens_T, batch.mask_T)), strict=True))


@torch.no_grad()
def logprobs(model: ModelConfig, seed: int) -> list[Tensor]:
    """Those of every token after the first of each sequence, by one teacher alone."""
    teacher, scored = hf_reference.build(model, seed=seed).double(), []
    teacher.set_experts_implementation("eager")  # the others have no float64
    for tokens, _ in sequences():
        of_all_TV = (teacher(tokens.unsqueeze(0)).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        scored.append(of_all_TV.gather(1, tokens[1:, None])[:, 0])
    return scored


@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name in LAYOUTS for layout in LAYOUTS[name]])
def test_log_probs_are_those_of_a_sequence_s_own_teacher(ranks: list[Found], name: str, layout: str) -> None:
    by_teacher = [logprobs(MODELS[name], seed) for seed in SEEDS]
    for names in (TAUGHT, MIXED):
        for of_rank in ranks:
            parts = of_rank.told[name, layout, names]
            assert sorted(parts) == list(range(len(names)))
            for sequence, number in enumerate(NUMBERS[each] for each in names):
                own, other = (by_teacher[each][sequence] for each in (number, 1 - number))
                ours = parts[sequence][1:].double()
                torch.testing.assert_close(ours, own, atol=5e-5, rtol=1e-5)
                assert len(own) < 2 or (ours - other).abs().max() > 0.01, "the two teachers say other things"


def test_hidden_states_are_those_of_a_sequence_s_own_teacher(ranks: list[Found]) -> None:
    teachers = [hf_reference.build(MODELS["dense"], seed=seed).double() for seed in SEEDS]
    for of_rank in ranks:
        for sequence, (tokens, mask) in enumerate(sequences()):
            with torch.no_grad():
                states = teachers[NUMBERS[MIXED[sequence]]].model(tokens.unsqueeze(0)).last_hidden_state[0, :-1]
            torch.testing.assert_close(of_rank.hidden[sequence].double(), states[mask[1:]], atol=2e-5, rtol=1e-5)


def by_transformers(kind: Divergence) -> tuple[dict[int, Tensor], float]:
    """The divergence at the trained tokens of each sequence, and the norm of the loss's gradient."""
    policy = hf_reference.build(POLICY, seed=1).double()
    teachers, values = [hf_reference.build(MODELS["dense"], seed=seed).double() for seed in SEEDS], dict[int, Tensor]()
    for sequence, (tokens, mask) in enumerate(sequences()):
        p_TV = (policy(tokens.unsqueeze(0)).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        with torch.no_grad():
            logits_TV = teachers[NUMBERS[MIXED[sequence]]](tokens.unsqueeze(0)).logits[0, :-1, : POLICY.vocab_size]
            q_TV = (logits_TV / TEMPERATURE).log_softmax(-1)
        m_TV = (BETA * q_TV.exp() + (1 - BETA) * p_TV.exp()).log()

        def kl(a_TV: Tensor, b_TV: Tensor) -> Tensor:
            return (a_TV.exp() * (a_TV - b_TV)).sum(-1)

        value_T = {
            Divergence.reverse_kl: kl(p_TV, q_TV),
            Divergence.forward_kl: kl(q_TV, p_TV),
            Divergence.jensen_shannon: BETA * kl(q_TV, m_TV) + (1 - BETA) * kl(p_TV, m_TV),
        }[kind]
        values[sequence] = value_T[mask[1:]]
    (COEF * torch.cat([*values.values()]).mean()).backward()
    norm = sum(float(x.grad.square().sum()) for x in policy.parameters() if x.grad is not None) ** 0.5
    return {sequence: value_M.detach() for sequence, value_M in values.items()}, norm


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.divergence.value)
def test_the_loss_is_of_each_sequence_s_own_teacher(ranks: list[Found], config: DistillConfig) -> None:
    values, norm = by_transformers(config.divergence)
    whole, key = torch.cat([*values.values()]), f"distill/{config.divergence.value}"
    for layout in POLICY_LAYOUTS:
        for of_rank in ranks:
            step = of_rank.trained[config.divergence, layout]
            assert step.metrics[key] == pytest.approx(float(whole.sum()), rel=2e-5), layout
            assert step.loss == pytest.approx(COEF * float(whole.mean()), rel=2e-5), layout
            assert step.grad_norm == pytest.approx(norm, rel=1e-4), layout
            for number, name in enumerate(NAMES):
                own = torch.cat([values[sequence] for sequence, each in enumerate(MIXED) if each == number])
                assert step.metrics[f"{key}/{name}"] == pytest.approx(float(own.sum()), rel=2e-5), layout
                assert step.metrics[f"taught/{name}"] == len(own) > 0, layout
