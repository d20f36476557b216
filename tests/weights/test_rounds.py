"""The two stages on integers: every element lands where a direct load puts it, and crosses to a node once.

The oracles: the rollout table's own load of a numbered checkpoint, which knows no plan; and for the bytes between
nodes the sets of elements that a node wants and has.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import pytest
import yaml

from benchmarks.rounds import sites_of
from mcore_rl.config.launch import load_recipe
from mcore_rl.config.parallel import parse_layout
from mcore_rl.config.rollout import parse_rollout_layout
from mcore_rl.config.run import RunConfig
from mcore_rl.families.registry import FAMILIES, model_of
from mcore_rl.ground.arrays import Int64Array
from mcore_rl.planning.recipes import recipe_config_json
from mcore_rl.proofs.tracer import Tracer, direct_tensors, index, reduced_config
from mcore_rl.weights.messages import MessagePart
from mcore_rl.weights.reshard import ReshardPlan, plan_reshard
from mcore_rl.weights.rollout_table import RolloutTable, itemsize_of
from mcore_rl.weights.rounds import Block, Round, Rounds, rounds_id
from mcore_rl.weights.sites import DIRECT, Sites
from mcore_rl.weights.table import Table
from tests.house.source import ROOT
from tests.support import models
from tests.support.checkpoints import MODELS

MAX_BYTES = 20_000
ITEMSIZE = 8  # of the integers; 4 where a rule says float32
UNEVEN = models.moe(
    num_attention_heads=8, num_query_groups=4, hidden_size=40, head_dim=6, num_layers=4, ffn_hidden_size=64
)


@dataclass(frozen=True)
class Case:
    """per_node: ranks of a node.  apart: the rollout ranks have devices of their own, on further nodes."""

    family: str
    training: str
    world_size: int
    rollout: str
    per_node: int
    apart: bool = False

    def sites(self) -> Sites:
        trainers = [rank // self.per_node for rank in range(self.world_size)]
        num_rollout = parse_rollout_layout(self.rollout).world_size
        if not self.apart:
            return Sites.colocated(trainers, num_rollout)
        first = trainers[-1] + 1
        return Sites(tuple(trainers), tuple(first + rank // self.per_node for rank in range(num_rollout)))

    def plan(self) -> ReshardPlan:
        model = UNEVEN if self.family == "mixtral" else MODELS[self.family]
        table = Table(FAMILIES[self.family], model, parse_layout(self.training), self.world_size)
        rollout = RolloutTable(table.family, model, parse_rollout_layout(self.rollout))
        return plan_reshard(table, rollout, ITEMSIZE, self.sites())


CASES = [
    Case("llama", "", 1, "", per_node=1),
    Case("llama", "tp=2,pp=2", 4, "tp=2,dp=2", per_node=4),
    Case("llama", "tp=2,pp=2", 8, "tp=2,dp=4", per_node=4),  # two replicas on each node
    Case("qwen2", "pp=4", 8, "tp=4,dp=2", per_node=4),  # tied; key/value heads that several ranks hold
    Case("mixtral", "tp=2,pp=2,ep=2", 16, "tp=4,dp=4", per_node=8),
    Case("mixtral", "tp=2,pp=2,vpp=2,ep=2", 8, "tp=2,dp=2,ep=4", per_node=2),  # experts over replicas
    Case("mixtral", "tp=2,pp=2,ep=2", 8, "tp=2,dp=2", per_node=4),  # half of the devices have no rollout rank
    Case("deepseek_v3", "tp=2,pp=2,ep=2", 4, "tp=2,dp=2,ep=4", per_node=2),
    Case("qwen2", "pp=4", 8, "tp=4,dp=2", per_node=2),  # each engine on two nodes
    Case("gemma2", "tp=2,cp=2,pp=2", 8, "tp=2,dp=4", per_node=2),
    Case("llama", "tp=2,pp=2", 8, "tp=2,dp=4", per_node=4, apart=True),
    Case("mixtral", "tp=2,pp=2,ep=2", 8, "tp=2,dp=4", per_node=4, apart=True),
    Case("qwen2", "tp=2", 4, "tp=4,dp=2", per_node=8, apart=True),
    Case("qwen2", "tp=2", 4, "tp=4,dp=2", per_node=2, apart=True),  # each engine on two nodes
]


@dataclass
class Member:
    """One member: the messages of the round that it holds, as bytes, and what it sent and received."""

    rounds: dict[int, Round]
    holds: dict[int, np.ndarray] = field(default_factory=dict)


class World:
    """Every member, in one process; a transfer is a copy from one to the other."""

    def __init__(self, rounds: Rounds) -> None:
        self.rounds, self.plan, self.sites = rounds, rounds.plan, rounds.sites
        self.tracer = Tracer(self.plan)
        self.members = [Member({each.number: each for each in rounds.of(m)}) for m in range(self.sites.members)]
        rollout = self.plan.rollout
        self.tensors = [
            {tensor.name: np.zeros(rollout.shape(tensor), dtype=np.int64) for tensor in rollout.tensors(rank)}
            for rank in range(rollout.layout.world_size)
        ]
        self.messages = [rounds.messages_to(rank) for rank in range(rollout.layout.world_size)]
        self.crossed = 0
        self.sent: dict[tuple[int, int], int] = defaultdict(int)  # (round, member) -> bytes to others

    def run(self) -> None:
        left = [list(messages) for messages in self.messages]
        for number in range(len(self.rounds)):
            here = [member.rounds.get(number, Round(number)) for member in self.members]
            for member, each in zip(self.members, here, strict=True):
                member.holds = {rank: np.full(size, 0xAB, dtype=np.uint8) for rank, size in each.lands.items()}
            for leg in range(2):
                self._leg(leg, here)
            for member in self.members:
                for rank, data in member.holds.items():
                    self._hand_over(rank, data, left[rank].pop(0))
        assert not any(left), "messages that no round brought"

    def _leg(self, leg: int, here: list[Round]) -> None:
        under_way: dict[tuple[int, int], list[tuple[int, np.ndarray]]] = defaultdict(list)
        for me, each in enumerate(here):
            for block in each.legs[leg]:
                if block.sender == me:
                    under_way[me, block.receiver].append((block.rollout_rank, self._bytes(me, block)))
                    if block.receiver != me:
                        self.sent[each.number, me] += block.num_bytes
                    if self.sites.nodes[me] != self.sites.nodes[block.receiver]:
                        self.crossed += sum(part.num_bytes for part in block.parts)
        for me, each in enumerate(here):
            for block in each.legs[leg]:
                if block.receiver == me:
                    rank, data = under_way[block.sender, me].pop(0)
                    assert (rank, len(data)) == (block.rollout_rank, block.num_bytes), "both sides have one order"
                    self.members[me].holds[rank][block.begin : block.begin + block.num_bytes] = data
        assert not any(under_way.values()), "what is sent is received"

    def _bytes(self, me: int, block: Block) -> np.ndarray:
        data = np.full(block.num_bytes, 0xCD, dtype=np.uint8)
        for number, part in enumerate(block.parts):
            if block.relay == DIRECT:
                values = self.tracer.source(me, part.chunk, part.source)[index(part.source_slice)].astype(type_of(part))
                held = np.frombuffer(np.ascontiguousarray(values).tobytes(), dtype=np.uint8)
            else:
                begin = block.copied_from[number]
                held = self.members[me].holds[block.relay][begin : begin + part.num_bytes]
            data[part.begin : part.begin + part.num_bytes] = held
        return data

    def _hand_over(self, rank: int, data: np.ndarray, message: object) -> None:
        assert len(data) == message.num_bytes <= MAX_BYTES  # type: ignore[attr-defined]
        for part in message.parts:  # type: ignore[attr-defined]
            values = data[part.begin : part.begin + part.num_bytes].view(type_of(part))
            tensor = self.tensors[rank][part.target]
            assert not tensor[index(part.target_slice, part.slot)].any(), f"{part.target} is written twice"
            tensor[index(part.target_slice, part.slot)] = values.reshape(part.target_slice.shape)


def type_of(part: MessagePart) -> type[np.generic]:
    return np.int64 if part.dtype is None else np.int32


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_element_lands_and_crosses_to_a_node_once(case: Case) -> None:
    rounds = Rounds(case.plan(), MAX_BYTES)
    world = World(rounds)
    world.run()
    for rank, tensors in enumerate(world.tensors):
        wanted = direct_tensors(rounds.plan.rollout, rank, world.tracer.checkpoint)
        assert tensors.keys() == wanted.keys()
        for name, values in wanted.items():
            assert np.array_equal(tensors[name], values), (rank, name)
    assert world.crossed == rounds.bytes_between_nodes == least_bytes(rounds.plan, world.tracer)
    assert max(world.sent.values(), default=0) <= MAX_BYTES


def least_bytes(plan: ReshardPlan, tracer: Tracer) -> int:
    """What must come to the nodes, counted element by element: wanted there, and in no training rank's memory there."""
    assert plan.sites is not None
    total = 0
    for node in set(plan.sites.rollout):
        wanted: dict[int, list[Int64Array]] = defaultdict(list)  # by bytes of an element
        for rank, at in enumerate(plan.sites.rollout):
            if at == node:
                kept = {tensor.name: itemsize_of(tensor.rule, ITEMSIZE) for tensor in plan.rollout.tensors(rank)}
                for name, values in direct_tensors(plan.rollout, rank, tracer.checkpoint).items():
                    wanted[kept[name]].append(values.ravel())
        there = [np.zeros(1, dtype=np.int64)]  # padding
        for rank, at in enumerate(plan.sites.trainers):
            if at == node:
                there += [tracer.source(rank, *key).ravel() for key in tracer.locals(rank)]
        for itemsize, values in wanted.items():
            total += itemsize * len(np.setdiff1d(np.concatenate(values), np.concatenate(there)))
    return total


RECIPES = sorted(  # of runs that have engines, with a published checkpoint
    path.stem
    for path in (ROOT / "launch" / "recipes").glob("*.yaml")
    if "train" in (recipe := yaml.safe_load(path.read_text()))["defaults"] and "checkpoint" in recipe.get("recipe", {})
)


@pytest.mark.tier("full")
@pytest.mark.parametrize("name", RECIPES)
def test_in_the_layout_of_every_recipe_nothing_crosses_twice(name: str) -> None:
    """The recipe's ranks and nodes, at reduced sizes."""
    run = load_recipe(name, [])
    assert isinstance(run, RunConfig)
    layout = run.rollout.layout
    config = reduced_config(recipe_config_json(run), run.actor.parallel, layout)
    family, model = model_of(config)
    table = Table(family, model, run.actor.parallel, run.trainer.world_size)
    plan = plan_reshard(table, RolloutTable(family, model, layout), ITEMSIZE, sites_of(run))
    rounds = Rounds(plan, MAX_BYTES)
    assert rounds.bytes_between_nodes == least_bytes(plan, Tracer(plan))


def test_cases_use_both_legs_and_every_kind_of_block() -> None:
    seen = set()
    for case in CASES:
        rounds = Rounds(case.plan(), MAX_BYTES)
        for member in range(rounds.sites.members):
            for each in rounds.of(member):
                for leg in range(2):
                    seen |= {(leg, block.sender == block.receiver, block.relay == DIRECT) for block in each.legs[leg]}
    assert seen == {(0, True, True), (0, False, True), (1, False, False)}


def test_several_rollout_ranks_of_one_host_share_what_it_receives() -> None:
    """Two nodes of a CPU machine with one training process each, and two engines on each."""
    model = MODELS["llama"]
    table = Table(FAMILIES["llama"], model, parse_layout("pp=2"), 2)
    rollout = RolloutTable(table.family, model, parse_rollout_layout("dp=4"))
    rounds = Rounds(plan_reshard(table, rollout, ITEMSIZE, Sites((0, 1), (0, 1, 0, 1), (0, 1, 0, 1))), MAX_BYTES)
    world = World(rounds)
    world.run()
    for rank, tensors in enumerate(world.tensors):
        for name, values in direct_tensors(rollout, rank, world.tracer.checkpoint).items():
            assert np.array_equal(tensors[name], values), (rank, name)
    assert world.crossed == least_bytes(rounds.plan, world.tracer)


def test_a_colocated_worker_whose_device_receives_for_it_has_no_round() -> None:
    """What lands on its device lands with the training rank there, and is handed over."""
    case = CASES[2]
    rounds = Rounds(case.plan(), MAX_BYTES)
    num_rollout = parse_rollout_layout(case.rollout).world_size
    assert [rounds.of(case.world_size + rank) for rank in range(num_rollout)] == [[]] * num_rollout
    assert all(rounds.of(rank) for rank in range(case.world_size))


def test_every_stage_sends_from_the_beginning() -> None:
    """Four stages: in the order of the layers alone, three of them would wait."""
    plan = Case("mixtral", "tp=2,pp=4,ep=2", 8, "tp=8", per_node=8).plan()
    rounds = Rounds(plan, MAX_BYTES)
    quarter = len(rounds) // 4
    assert quarter > 1
    early = rounds.row[rounds.round < quarter]
    stages = {plan.table.layout.coords(rank).pp for rank in plan.source_rank[early].tolist()}
    assert stages == {0, 1, 2, 3}


def test_equal_plans_have_equal_rounds_and_others_another_hash() -> None:
    case = CASES[2]
    one = rounds_id(Rounds(case.plan(), MAX_BYTES))
    assert one == rounds_id(Rounds(case.plan(), MAX_BYTES))
    others = [
        Rounds(case.plan(), MAX_BYTES // 2),
        Rounds(Case("llama", "tp=2,pp=2", 8, "tp=2,dp=4", per_node=2).plan(), MAX_BYTES),
        Rounds(Case("llama", "tp=2,pp=2", 8, "tp=4,dp=2", per_node=4).plan(), MAX_BYTES),
    ]
    assert one not in {rounds_id(each) for each in others}
