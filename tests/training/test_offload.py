"""What leaves, to the byte; that it comes back bit for bit; that memory is really freed; what is refused meanwhile.

All sizes of the tiny models are multiples of 128 elements, to which Megatron rounds its buffers up, so the expected
bytes are exact: 4 for a float32 gradient; 2 or 4 for a weight; two float32 moments; and, for a bfloat16 weight, a
float32 main weight (a float32 weight is its own).

What moves behind the computation moves by ``LateCopies``, which finish when they must and not before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import permutations

import pytest
from torch import Tensor

from mcore_rl.config.engine import OptimizerConfig, Precision
from mcore_rl.config.model import ModelConfig, MoeConfig
from mcore_rl.ground.types import StepResult, TokenScores, TrainBatch
from mcore_rl.parallel.device import memory
from mcore_rl.parallel.groups import ProcessGroups
from mcore_rl.parallel.launch import Rank
from mcore_rl.training.engine import Engine
from mcore_rl.training.offload import InHost, Offload, OffloadPart
from tests.support import batches, engines, models
from tests.support.forked import run_ranks
from tests.support.late_copies import LateCopies

WIDTHS = dict(
    num_layers=2, hidden_size=128, ffn_hidden_size=256, num_attention_heads=4, num_query_groups=2, head_dim=32,
    vocab_size=128,
)  # fmt: skip
MODELS = {
    "dense": models.dense(**WIDTHS),
    "moe": models.moe(**(WIDTHS | {"moe": MoeConfig(num_experts=4, top_k=2, ffn_hidden_size=64)})),
}
KINDS = [(name, precision) for name in MODELS for precision in Precision]
BYTES = {
    Precision.float32: {OffloadPart.weights: 4, OffloadPart.gradients: 4, OffloadPart.optimizer: 8},
    Precision.bfloat16: {OffloadPart.weights: 2, OffloadPart.gradients: 4, OffloadPart.optimizer: 12},
}
# (what leaves, what comes back), in these orders; a step follows each.
JOURNEYS = [(out, back) for out in permutations(OffloadPart) for back in (out, out[::-1])] + [
    ((part,), (part,)) for part in OffloadPart
]

BEHIND = (OffloadPart.optimizer,)
LAYOUTS = ("tp=2", "pp=2", "", "ep=2")  # of two processes, the third is dp=2

# 51 million parameters, nearly all in matrices whose float32 state is larger than 32 MiB.
BIG = models.dense(
    num_layers=1, hidden_size=1024, ffn_hidden_size=9216, num_attention_heads=8, num_query_groups=2, head_dim=128,
    vocab_size=10240,
)  # fmt: skip


@dataclass
class Observed:
    """One kind of model.  moved: bytes by what was done.  here: bytes of storage, by part, by when."""

    num_parameters: int = 0
    moved: dict[str, dict[OffloadPart, int]] = field(default_factory=dict)
    here: dict[str, dict[OffloadPart, int]] = field(default_factory=dict)
    is_away: dict[str, list[bool]] = field(default_factory=dict)
    steps: list[tuple[StepResult, list[Tensor]]] = field(default_factory=list)
    never_left: list[tuple[StepResult, list[Tensor]]] = field(default_factory=list)
    scores: tuple[TokenScores, TokenScores] | None = None
    are_gradients_zero: bool = False
    refusals: dict[str, str] = field(default_factory=dict)
    in_host: list[Tensor | None] = field(default_factory=list)
    on_device: list[Tensor] = field(default_factory=list)
    blocks: dict[str, int] = field(default_factory=dict)
    none_away: bool = False
    behind: list[tuple[StepResult, list[Tensor]]] = field(default_factory=list)
    beside: list[tuple[StepResult, list[Tensor]]] = field(default_factory=list)
    behind_refusal: str = ""
    state: list[Tensor] = field(default_factory=list)
    in_host_behind: list[Tensor | None] = field(default_factory=list)
    none_away_behind: bool = False
    on_device_behind: list[Tensor] = field(default_factory=list)
    log: list[list[str]] = field(default_factory=list)
    used_too_early: tuple[list[Tensor], list[Tensor]] = ([], [])
    freed_too_early: str = ""


@dataclass
class Resident:
    """Resident bytes of a process with a large model: before, after each part left, and with all back."""

    num_parameters: int
    before: int
    without: dict[OffloadPart, int]
    back: int


def _batch() -> TrainBatch:
    return batches.ragged(101)


def _step(engine: Engine) -> StepResult:
    return engine.train_step(_batch(), batches.policy_loss, batches.denominators(_batch()), with_entropy=True)


def _bits(engine: Engine) -> list[Tensor]:
    return [*engines.weights_of(engine).values(), *engines.state_of(engine)]


def _num_blocks(hosts: list[InHost | None]) -> int:
    return len({host.tensor.untyped_storage().data_ptr() for host in hosts if host is not None})


def _here(engine: Engine) -> dict[OffloadPart, int]:
    """Bytes of all storages that an engine's tensors lie in, each counted once, under the first part that has it."""
    assert engine.optimizer is not None
    seen: set[int] = set()
    sizes = {}
    tensors = {
        OffloadPart.weights: list(engine.models[0].parameters()),
        OffloadPart.gradients: [parameter.main_grad for parameter in engine.models[0].parameters()],
        OffloadPart.optimizer: engine.optimizer.state_tensors(),
    }
    for part, part_tensors in tensors.items():
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in part_tensors}
        sizes[part] = sum(size for storage, size in storages.items() if storage not in seen)
        seen |= storages.keys()
    return sizes


def _observe_kind(groups: ProcessGroups, model: ModelConfig, precision: Precision) -> Observed:
    seen = Observed()
    never, engine = (engines.build(groups, model, engines.config(precision=precision)) for _ in range(2))
    seen.num_parameters = sum(parameter.numel() for parameter in engine.models[0].parameters())
    _step(never), _step(engine)  # so that there are moments
    seen.scores = never.score(_batch()), engine.score(_batch())
    memory_of = engine.memory
    seen.here["at first"] = _here(engine)
    seen.moved["out"] = memory_of.offload().num_bytes
    assert engine.optimizer is not None
    tensors = [*engine.models[0].parameters(), *engine.optimizer.state_tensors()]
    seen.in_host = [None if host is None else host.tensor.clone() for host in memory_of.away(tensors)]
    parts = {"weights": tensors[:1], "optimizer": engine.optimizer.state_tensors()}
    seen.blocks = {part: _num_blocks(memory_of.away(those)) for part, those in parts.items()}
    seen.here["away"], seen.is_away["away"] = _here(engine), [memory_of.is_away(part) for part in OffloadPart]
    seen.moved["out again"] = memory_of.offload().num_bytes
    seen.refusals = _refusals(engine)
    seen.moved["back"] = memory_of.onload().num_bytes
    seen.on_device = [tensor.detach().clone() for tensor in tensors]
    seen.none_away = memory_of.away(tensors) == [None] * len(tensors)
    seen.here["back"], seen.is_away["back"] = _here(engine), [memory_of.is_away(part) for part in OffloadPart]
    seen.moved["back again"] = memory_of.onload().num_bytes
    seen.are_gradients_zero = not any(parameter.main_grad.any() for parameter in engine.models[0].parameters())
    for out, back in JOURNEYS:
        memory_of.offload(out)
        if OffloadPart.weights not in out:
            seen.scores = never.score(_batch()), engine.score(_batch())
        memory_of.onload(back)
        seen.steps.append((_step(engine), _bits(engine)))
        seen.never_left.append((_step(never), _bits(never)))
    _observe_behind(seen, never, engine)
    return seen


def _slow(engine: Engine, forgets: str = "") -> LateCopies:
    """From now on the state of ``engine`` moves by the copies that are returned."""
    copies = LateCopies(forgets)
    engine.memory = Offload(engine.models, engine.chunks, engine.optimizer, engine.platform, copies)
    return copies


def _observe_behind(seen: Observed, never: Engine, engine: Engine) -> None:
    """The optimizer's state leaves and comes while other things happen; ``engine`` is spoiled afterwards."""
    copies = _slow(engine)
    for _ in range(2):
        seen.moved["out behind"] = engine.memory.offload(behind=BEHIND).num_bytes
        seen.here["leaving"] = _here(engine)
        seen.behind_refusal = _refusals(engine)["train_step"]
        engine.memory.offload([OffloadPart.weights])  # as when the engines have them
        seen.here["left"] = _here(engine)
        seen.moved["back behind"] = engine.memory.onload(behind=BEHIND).num_bytes
        seen.here["arriving"] = _here(engine)
        copies.log.clear()
        seen.behind.append((_step(engine), _bits(engine)))
        seen.beside.append((_step(never), _bits(never)))
        seen.log.append(list(copies.log))
    assert engine.optimizer is not None
    tensors = engine.optimizer.state_tensors()
    seen.state = [tensor.detach().clone() for tensor in tensors]
    engine.memory.offload(behind=BEHIND)
    seen.in_host_behind = [None if host is None else host.tensor.clone() for host in engine.memory.away(tensors)]
    engine.memory.onload()
    engine.memory.offload(BEHIND, behind=BEHIND)
    engine.memory.onload(behind=BEHIND)  # before it was gone
    seen.none_away_behind = engine.memory.away(tensors) == [None] * len(tensors)
    seen.on_device_behind = [tensor.detach().clone() for tensor in tensors]
    seen.behind.append((_step(engine), _bits(engine)))
    seen.beside.append((_step(never), _bits(never)))
    _slow(engine, forgets="order")
    engine.memory.offload(behind=BEHIND)
    engine.memory.onload(behind=BEHIND)
    _step(engine), _step(never)
    seen.used_too_early = _bits(engine), _bits(never)
    copies = _slow(engine, forgets="wait")
    engine.memory.offload()
    try:
        copies.make(len(copies.log))
    except AssertionError as error:
        seen.freed_too_early = str(error)


def _refusals(engine: Engine) -> dict[str, str]:
    """What is said when all parts are away."""
    uses: dict[str, Callable[[], object]] = {
        "score": lambda: engine.score(_batch()),
        "train_step": lambda: _step(engine),
        "load_weights": lambda: engine.load_weights(engines.seed_weights),
    }
    said = {}
    for name, use in uses.items():
        try:
            use()
        except AssertionError as error:
            said[name] = str(error)
    return said


def _resident(groups: ProcessGroups) -> Resident:
    settings = engines.config(precision=Precision.bfloat16, optim=OptimizerConfig(lr=1e-4))
    engine = engines.build(groups, BIG, settings)
    _step(engine)
    num_parameters = sum(parameter.numel() for parameter in engine.models[0].parameters())
    resident = Resident(num_parameters, memory(engines.CPU).allocated_bytes, {}, 0)
    for part in OffloadPart:
        engine.memory.offload([part])
        resident.without[part] = memory(engines.CPU).allocated_bytes
    engine.memory.onload()
    resident.back = memory(engines.CPU).allocated_bytes
    return resident


def _observe(rank: Rank) -> tuple[dict[tuple[str, Precision], Observed], Resident, dict[OffloadPart, int]]:
    with engines.world(rank), engines.groups_of() as groups:
        kinds = {(name, precision): _observe_kind(groups, MODELS[name], precision) for name, precision in KINDS}
        only_scores = engines.build(groups, MODELS["dense"], trainable=False)
        return kinds, _resident(groups), only_scores.memory.offload().num_bytes


@pytest.fixture(scope="module")
def everything(processes: None) -> tuple[dict[tuple[str, Precision], Observed], Resident, dict[OffloadPart, int]]:
    return run_ranks(_observe, 1)[0]


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0]} in {kind[1].value}")
def kind(request: pytest.FixtureRequest) -> tuple[str, Precision]:
    return request.param


@pytest.fixture
def observed(everything: tuple[dict[tuple[str, Precision], Observed], ...], kind: tuple[str, Precision]) -> Observed:
    return everything[0][kind]


def expected(observed: Observed, precision: Precision) -> dict[OffloadPart, int]:
    return {part: size * observed.num_parameters for part, size in BYTES[precision].items()}


def test_exactly_what_is_there_moves(observed: Observed, kind: tuple[str, Precision]) -> None:
    assert observed.moved["out"] == observed.moved["back"] == expected(observed, kind[1])
    assert observed.here["at first"] == observed.here["back"] == expected(observed, kind[1])


def test_nothing_stays(observed: Observed) -> None:
    assert observed.here["away"] == dict.fromkeys(OffloadPart, 0)


def test_what_is_away_can_be_read_where_it_is(observed: Observed) -> None:
    """As a checkpoint does, without bringing it back."""
    assert engines.same_bits(observed.in_host, observed.on_device) and observed.none_away


def test_a_part_is_in_one_block(observed: Observed) -> None:
    """Each block of pinned memory may be rounded up.  Main weights of a float32 model lie with the weights."""
    assert observed.blocks in ({"weights": 1, "optimizer": 1}, {"weights": 1, "optimizer": 2})


def test_moving_twice_does_nothing(observed: Observed) -> None:
    assert sum(observed.moved["out again"].values()) == 0
    assert sum(observed.moved["back again"].values()) == 0
    assert observed.is_away == {"away": [True] * 3, "back": [False] * 3}


def test_every_order_comes_back_bit_for_bit(observed: Observed) -> None:
    """Results, weights, main weights and moments of a step after each journey, beside an engine that never left."""
    assert len(observed.steps) == len(JOURNEYS) == 15
    for journey, ours, theirs in zip(JOURNEYS, observed.steps, observed.never_left, strict=True):
        assert ours[0] == theirs[0] and ours[0].skipped is None, journey
        assert engines.same_bits(ours[1], theirs[1]), journey
    assert not engines.same_bits(observed.steps[0][1], observed.steps[1][1])


def test_what_moves_behind_the_step_changes_no_bit(observed: Observed) -> None:
    """The copies of the optimizer's state are made when the optimizer needs them, after forward and backward."""
    assert len(observed.behind) == 3
    for ours, theirs in zip(observed.behind, observed.beside, strict=True):
        assert ours[0] == theirs[0] and ours[0].skipped is None
        assert engines.same_bits(ours[1], theirs[1])
    assert observed.log == [["order"], ["order"]], "a step waits once, and the host for nothing"


def test_what_leaves_behind_keeps_its_memory_until_the_next_offload(
    observed: Observed, kind: tuple[str, Precision]
) -> None:
    whole = expected(observed, kind[1])
    nothing = dict.fromkeys(OffloadPart, 0)
    assert observed.here["leaving"] == nothing | {OffloadPart.optimizer: whole[OffloadPart.optimizer]}
    assert observed.here["left"] == nothing
    assert observed.here["arriving"] == observed.moved["out behind"] == observed.moved["back behind"] == whole
    assert observed.behind_refusal == "in host memory: weights, gradients, optimizer; onload first"


def test_what_is_under_way_can_be_read_where_it_is(observed: Observed) -> None:
    """As a checkpoint does; it waits for the copies."""
    assert engines.same_bits(observed.in_host_behind, observed.state)
    assert observed.none_away_behind and engines.same_bits(observed.on_device_behind, observed.state)


def test_a_wait_that_is_left_out_is_seen(observed: Observed) -> None:
    """Proves the proof: the slow copies of these tests betray whoever does not wait for them."""
    assert len(observed.used_too_early[0]) > 0 and not engines.same_bits(*observed.used_too_early)
    assert observed.freed_too_early == "the source of a copy was freed before the copy was done"


def _observe_layouts(rank: Rank) -> dict[str, list[tuple[StepResult, list[Tensor]]]]:
    """By layout: a second step of an engine that left and came back behind the step, and of one that did not."""
    seen = {}
    with engines.world(rank):
        for layout in LAYOUTS:
            with engines.groups_of(layout) as groups:
                model, both = MODELS["moe" if layout == "ep=2" else "dense"], []
                for leaves in (True, False):
                    settings = engines.config(precision=Precision.bfloat16)
                    engine = engines.build(groups, model, settings, layout=layout)
                    mine = engines.share_of(_batch(), groups)
                    counts = batches.denominators(_batch())
                    engine.train_step(mine, batches.policy_loss, counts, with_entropy=True)
                    if leaves:
                        _slow(engine)
                        engine.memory.offload(behind=BEHIND)
                        engine.memory.onload(behind=BEHIND)
                    result = engine.train_step(mine, batches.policy_loss, counts, with_entropy=True)
                    both.append((result, _bits(engine)))
                seen[layout] = both
    return seen


def test_no_layout_changes_that(processes: None) -> None:
    for of_rank in run_ranks(_observe_layouts, 2):
        assert of_rank.keys() == set(LAYOUTS)
        for layout, (ours, theirs) in of_rank.items():
            assert ours[0] == theirs[0] and engines.same_bits(ours[1], theirs[1]), layout


def test_gradients_come_back_as_zeros(observed: Observed) -> None:
    assert observed.are_gradients_zero


def test_scoring_needs_the_weights_alone(observed: Observed) -> None:
    assert observed.scores is not None
    never, ours = observed.scores
    assert engines.same_bits(vars(never), vars(ours))


def test_what_is_away_is_refused_instead_of_read(observed: Observed) -> None:
    assert observed.refusals == {
        "score": "in host memory: weights; onload first",
        "train_step": "in host memory: weights, gradients, optimizer; onload first",
        "load_weights": "in host memory: weights, optimizer; onload first",
    }


def test_an_engine_that_only_scores_has_weights_alone(
    everything: tuple[dict[tuple[str, Precision], Observed], Resident, dict[OffloadPart, int]],
) -> None:
    num_parameters = everything[0]["dense", Precision.float32].num_parameters
    assert everything[2] == {
        OffloadPart.weights: 4 * num_parameters,
        OffloadPart.gradients: 0,
        OffloadPart.optimizer: 0,
    }


def test_memory_is_really_freed(
    everything: tuple[dict[tuple[str, Precision], Observed], Resident, dict[OffloadPart, int]],
) -> None:
    """On the CPU the host copy stays in the same memory, so only gradients, which are dropped, make the process
    smaller; weights and optimizer state leave it as large as it was, where a copy that did not free would add 2 and 12
    bytes a parameter.  The C allocator may keep freed blocks of less than 32 MiB, in which 0.6 bytes a parameter of the
    optimizer state lie, and as much of its copy.  The bound is 1.5 bytes a parameter."""
    resident = everything[1]
    per_parameter = {
        part: (after - before) / resident.num_parameters
        for part, before, after in zip(
            OffloadPart, [resident.before, *resident.without.values()], resident.without.values(), strict=False
        )
    }
    assert resident.num_parameters > 50e6
    assert per_parameter == pytest.approx(
        {OffloadPart.weights: 0, OffloadPart.gradients: -4, OffloadPart.optimizer: 0}, abs=1.5
    )
    assert (resident.back - resident.before) / resident.num_parameters == pytest.approx(0, abs=1.5)
