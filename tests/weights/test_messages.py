"""Both sides cut the plan alike, every element is in one message, and no order of waiting can go in a circle."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from mcore_rl.config.parallel import parse_layout
from mcore_rl.config.rollout import parse_rollout_layout
from mcore_rl.families.registry import FAMILIES
from mcore_rl.weights.messages import messages_from, messages_to, plan_id
from mcore_rl.weights.reshard import ReshardPlan, plan_reshard
from mcore_rl.weights.rollout_table import RolloutTable
from mcore_rl.weights.table import Table
from mcore_rl.weights.views import view_of
from tests.support.checkpoints import MODELS

CASES = [
    ("llama", "tp=2,pp=2", 4, "tp=2,dp=2"),
    ("qwen2", "pp=2", 4, "tp=4"),
    ("mixtral", "tp=2,ep=2,etp=1", 4, "tp=2,ep=2"),
    ("qwen3_moe", "ep=2", 2, "tp=2"),
    ("deepseek_v3", "tp=2,pp=2,ep=2", 4, "tp=2,dp=2,ep=4"),
]
MAX_BYTES = 5000


def plan_of(name: str, training: str, world_size: int, rollout: str) -> ReshardPlan:
    table = Table(FAMILIES[name], MODELS[name], parse_layout(training), world_size)
    return plan_reshard(table, RolloutTable(FAMILIES[name], MODELS[name], parse_rollout_layout(rollout)), 4)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_sides_agree_and_everything_is_sent_once(case: tuple[str, str, int, str]) -> None:
    plan = plan_of(*case)
    training, rollout = plan.table.layout.world_size, plan.rollout.layout.world_size
    sent = {rank: messages_from(plan, rank, MAX_BYTES) for rank in range(training)}
    for target in range(rollout):
        received = messages_to(plan, target, MAX_BYTES)
        for source in range(training):
            mine = [message for message in received if message.source_rank == source]
            assert mine == [message for message in sent[source] if message.target_rank == target]
        assert all(message.num_bytes <= MAX_BYTES for message in received)
        assert sum(message.num_bytes for message in received) == plan.bytes_received[target]
        written = {t.name: torch.zeros(plan.rollout.shape(t), dtype=torch.int8) for t in plan.rollout.tensors(target)}
        for part in (part for message in received for part in message.parts):
            tensor = written[part.target] if part.slot is None else written[part.target][part.slot]
            view_of(tensor, part.target_slice).add_(1)
            assert part.source_slice.shape == part.target_slice.shape
        for tensor in plan.rollout.tensors(target):
            counts = written[tensor.name]
            dim = tensor.rule.dim + tensor.rule.stacked
            held = sum(range_.end - range_.begin for range_ in plan.rollout.shard(tensor).ranges)
            assert (counts.narrow(dim, 0, held) == 1).all(), tensor.name
            assert not counts.narrow(dim, held, counts.shape[dim] - held).any(), tensor.name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_message_at_a_time_never_waits_in_a_circle(case: tuple[str, str, int, str]) -> None:
    """The strictest transport there is: a message passes only when its sender and its receiver have come to it."""
    plan = plan_of(*case)
    sending = [messages_from(plan, rank, MAX_BYTES) for rank in range(plan.table.layout.world_size)]
    receiving = [messages_to(plan, rank, MAX_BYTES) for rank in range(plan.rollout.layout.world_size)]
    while any(sending) or any(receiving):
        ready = [queue[0] for queue in sending if queue and receiving[queue[0].target_rank][0] == queue[0]]
        assert ready, "everybody waits"
        for message in ready:
            sending[message.source_rank].pop(0)
            receiving[message.target_rank].pop(0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_fits_is_sent_together(case: tuple[str, str, int, str]) -> None:
    for one, next_one in pairwise(messages_to(plan_of(*case), 0, MAX_BYTES)):
        if (one.source_rank, one.target_rank) == (next_one.source_rank, next_one.target_rank):
            assert one.num_bytes + next_one.parts[0].num_bytes > MAX_BYTES, "what fits is not sent apart"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_embedding_comes_last(case: tuple[str, str, int, str]) -> None:
    targets = [part.target for message in messages_to(plan_of(*case), 0, MAX_BYTES) for part in message.parts]
    first = targets.index("model.embed_tokens.weight")
    assert first > 0
    assert set(targets[first:]) == {"model.embed_tokens.weight"}


def test_plans_that_would_be_cut_otherwise_have_other_ids() -> None:
    one = plan_of(*CASES[0])
    assert plan_id(one, 5000) == plan_id(plan_of(*CASES[0]), 5000)
    others = [plan_of("llama", "tp=2", 4, "tp=2,dp=2"), plan_of("llama", "tp=2,pp=2", 4, "tp=4")]
    assert len({plan_id(one, 5000), plan_id(one, 6000), *(plan_id(other, 5000) for other in others)}) == 4
