"""The engines of teacher and policy in several layouts, against transformers in float64 on both models.

The teacher has another size, layout and padding of its vocabulary; its weights are read from a checkpoint, as a run
reads them.  Tolerances: two models in float32, sums of a thousand rounded products each, 1e-6 relative a layer.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.algorithms.policy import policy_loss
from mcore_rl.checkpoints.hf_directory import HfCheckpoint
from mcore_rl.checkpoints.load import load_hf
from mcore_rl.config.algorithm import DistillConfig, Divergence
from mcore_rl.config.engine import Precision
from mcore_rl.config.parallel import parse_layout
from mcore_rl.config.role import Head
from mcore_rl.families.config_json import read_config
from mcore_rl.families.registry import model_of
from mcore_rl.ground.types import StepResult, TrainBatch
from mcore_rl.parallel.groups import ProcessGroups
from mcore_rl.parallel.launch import Rank
from mcore_rl.training.distillation import Teacher
from mcore_rl.weights.table import Table
from tests.support import batches, engines, full_weights, hf_reference, models
from tests.support.forked import run_ranks
from tests.support.settings import actor_config

POLICY = models.dense(num_layers=2)
TEACHERS = {
    "wider": models.dense(num_layers=4, hidden_size=64, vocab_size=POLICY.vocab_size + 7),
    "gemma2": models.gemma2(vocab_size=POLICY.vocab_size),  # tied, and its logits are capped
}
TEACHER_LAYOUTS = ("tp=2,pp=2", "cp=2,pp=2", "tp=2", "")
LAYOUTS = ("tp=2,cp=2", "tp=4", "pp=2", "cp=2", "")
TEMPERATURE, COEF, BETA = 0.7, 0.5, 0.3
CONFIGS = [
    DistillConfig(coef=COEF, divergence=kind, jsd_beta=BETA) for kind in Divergence if kind is not Divergence.drawn
]


def batch_of() -> TrainBatch:
    """Advantages of 0: nothing is trained but the divergence."""
    batch = batches.ragged(POLICY.vocab_size)
    assert batch.advantages_T is not None
    return replace(batch, advantages_T=torch.zeros_like(batch.advantages_T))


@dataclass
class Found:
    """Of one rank.  hidden: of each teacher in each of its layouts.  trained: by teacher, divergence and layout."""

    hidden: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    trained: dict[tuple[str, Divergence, str], StepResult] = field(default_factory=dict)


def hidden_of(name: str, directory: Path, layout: str) -> Tensor:
    """The teacher's hidden states of the whole batch, from the shares of all data-parallel ranks."""
    with engines.groups_of(layout) as groups, HfCheckpoint.open(directory) as checkpoint:
        family, model = model_of(read_config(directory))
        table = Table(family, model, parse_layout(layout), dist.get_world_size(), head=Head.hidden)
        engine = engines.build(
            groups, model, layout=layout, role="teacher", head=Head.hidden, trainable=False,
            load=partial(load_hf, checkpoint=checkpoint, table=table, rank=dist.get_rank()),
        )  # fmt: skip
        batch, dp = batch_of(), groups.layout.dp
        states = engine.hidden_states(engines.share_of(batch, groups))
        counts = [int(part.sum()) for part in batch.mask_T.split(list(batch.lengths_S))]
        gathered = [b""] * dist.get_world_size()
        dist.all_gather_object(gathered, pickle.dumps((groups.coords.dp, states)))
        parts: dict[int, Tensor] = {}
        for coordinate, of_rank in map(pickle.loads, gathered):
            members = range(coordinate, len(counts), dp)
            for index, part in zip(members, of_rank.split([counts[index] for index in members]), strict=True):
                assert index not in parts or torch.equal(parts[index], part), "peers have the same"
                parts[index] = part
        return torch.cat([parts[index] for index in range(len(counts))])


def train(groups: ProcessGroups, layout: str, teacher: Path, hidden_MH: Tensor, config: DistillConfig) -> StepResult:
    policy = hf_reference.full_weights(hf_reference.build(POLICY, seed=1), POLICY)
    engine = engines.build(groups, POLICY, layout=layout, load=partial(full_weights.load_full, weights=policy))
    if groups.is_last_stage:
        engine.teacher = Teacher.load([teacher], Precision.float32, POLICY, groups, engines.CPU)
    batch = replace(batch_of(), teacher_hidden_MH=hidden_MH, teacher_scored_T=batch_of().mask_T)
    # Corrections may leave out tokens that the teacher scored.
    batch = replace(batch, mask_T=batch.mask_T & (torch.arange(len(batch.mask_T)) % 5 != 0))
    loss = replace(policy_loss(actor_config()), teacher=config)
    return engine.train_step(
        engines.share_of(batch, groups), loss, batches.denominators(batch), temperature=TEMPERATURE, distill=config
    )


def on_ranks(rank: Rank, directory: Path) -> Found:
    with engines.world(rank):
        results = Found()
        for name in TEACHERS:
            for layout in TEACHER_LAYOUTS:
                results.hidden[name, layout] = hidden_of(name, directory / name, layout)
        for layout in LAYOUTS:
            with engines.groups_of(layout) as groups:
                for name in TEACHERS:
                    hidden_MH = results.hidden[name, TEACHER_LAYOUTS[0]]
                    for config in CONFIGS:
                        step = train(groups, layout, directory / name, hidden_MH, config)
                        results.trained[name, config.divergence, layout] = step
        return results


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("teachers")
    for name, model in TEACHERS.items():
        hf_reference.build(model, seed=2).save_pretrained(directory / name)
    return directory


@pytest.fixture(scope="module")
def ranks(teachers: Path, processes: None) -> list[Found]:
    return run_ranks(partial(on_ranks, directory=teachers), 4, timeout_s=600)


def sequences() -> Iterator[tuple[Tensor, Tensor]]:
    batch = batch_of()
    yield from zip(*(torch.split(x, batch.lengths_S) for x in (batch.tokens_T, batch.mask_T)), strict=True)


def test_the_hidden_states_are_those_of_transformers_in_any_layout(ranks: list[Found]) -> None:
    for name, model in TEACHERS.items():
        teacher = hf_reference.build(model, seed=2).double()
        with torch.no_grad():
            expected_MH = torch.cat(
                [teacher.model(tokens.unsqueeze(0)).last_hidden_state[0, :-1][mask[1:]] for tokens, mask in sequences()]
            )
        for layout in TEACHER_LAYOUTS:
            for of_rank in ranks:
                hidden_MH = of_rank.hidden[name, layout]
                torch.testing.assert_close(hidden_MH.double(), expected_MH, atol=2e-5, rtol=1e-5)


def by_transformers(name: str, kind: Divergence) -> tuple[float, float, float]:
    """Sum and maximum of the divergence over trained tokens, and the norm of the loss's gradient."""
    policy, teacher = (
        hf_reference.build(model, seed=seed).double() for model, seed in ((POLICY, 1), (TEACHERS[name], 2))
    )
    values, number = [], 0
    for tokens, mask in sequences():
        kept = mask & ((number + torch.arange(len(mask))) % 5 != 0)
        number += len(mask)
        p_TV = (policy(tokens.unsqueeze(0)).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        with torch.no_grad():  # of the tokens that the policy has
            q_TV = (teacher(tokens.unsqueeze(0)).logits[0, :-1, : POLICY.vocab_size] / TEMPERATURE).log_softmax(-1)
        if kind is Divergence.jensen_shannon:
            m_TV = (BETA * q_TV.exp() + (1 - BETA) * p_TV.exp()).log()
            to_q_T, to_p_T = ((x_TV.exp() * (x_TV - m_TV)).sum(-1) for x_TV in (q_TV, p_TV))
            value_T = BETA * to_q_T + (1 - BETA) * to_p_T
        else:
            own_TV, other_TV = (p_TV, q_TV) if kind is Divergence.reverse_kl else (q_TV, p_TV)
            value_T = (own_TV.exp() * (own_TV - other_TV)).sum(-1)
        values.append(value_T[kept[1:]])
    value_M = torch.cat(values)
    (COEF * value_M.mean()).backward()
    norm = sum(float(x.grad.square().sum()) for x in policy.parameters() if x.grad is not None) ** 0.5
    return float(value_M.detach().sum()), float(value_M.detach().max()), norm


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.divergence.value)
@pytest.mark.parametrize("name", TEACHERS)
def test_the_engine_trains_on_it_in_any_layout(ranks: list[Found], name: str, config: DistillConfig) -> None:
    kind = config.divergence
    total, largest, norm = by_transformers(name, kind)
    count = int((batch_of().mask_T & (torch.arange(len(batch_of().mask_T)) % 5 != 0)).sum())
    assert total / count > 0.05, "models that are apart"
    for layout in LAYOUTS:
        for of_rank in ranks:
            step = of_rank.trained[name, kind, layout]
            assert step.metrics[f"distill/{kind.value}"] == pytest.approx(total, rel=2e-5), layout
            assert step.maxima[f"distill/{kind.value}_max"] == pytest.approx(largest, rel=2e-5), layout
            assert step.loss == pytest.approx(COEF * total / count, rel=2e-5), layout
            assert step.grad_norm == pytest.approx(norm, rel=1e-4), layout
            assert step.skipped is None, layout
