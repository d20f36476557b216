"""Compares the modes of a run, and the splits of its devices between engines and trainer, by simulation.

The costs of a simulation are those of the plan: ``engine_costs`` takes apart what ``timing.generation_s`` adds up, a
training step costs what the plan's parts but drawing and the weight update cost, in proportion to its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

from mcore_rl.config.cluster import ClusterConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rollout import BYTES, RolloutConfig, state_bytes
from mcore_rl.config.run import RunConfig
from mcore_rl.config.trainer import Placement
from mcore_rl.families.flops import forward_flops, matmul_parameters
from mcore_rl.planning.lengths import Lengths, Lognormal, mean_lengths
from mcore_rl.planning.overheads import (
    GIB,
    ProcessMemory,
)
from mcore_rl.planning.plan import role_plan, updates_of
from mcore_rl.planning.search import NONE, Candidate, Others, fastest_by_rollout
from mcore_rl.planning.serving import Serving, cache_bytes_per_token, serving
from mcore_rl.planning.simulated_engine import EngineCosts
from mcore_rl.planning.simulation import (
    ONE_STEP_OFF,
    SYNC_COLOCATED,
    SYNC_SEPARATE,
    SimulatedMode,
    Simulation,
    TrainerCosts,
    Workload,
    asynchronous,
    simulate,
)
from mcore_rl.planning.timing import (
    Rates,
    compute_flops_rate,
    decode_latency_s,
    nodes_reduction_s,
    optimizer_s,
    streamed_bytes,
)
from mcore_rl.planning.training import engine_lora

SEPARATE_MODES = (
    SYNC_SEPARATE,
    ONE_STEP_OFF,
    asynchronous(4, in_flight=False),
    asynchronous(1),
    asynchronous(2),
    asynchronous(4),
)
PROMISING = 1.5  # times as long as the fastest engines draw by plan: slower layouts are not simulated
# Engines are alike, and so are groups.  Of more than these, a share of the engines is simulated with that share of the
# groups; steps of sync are up to 1 % shorter for it, those of async within 1 % of what all take.
MOST_ENGINES = 16
LEAST_GROUPS = 64


@dataclass(frozen=True, kw_only=True)
class ModeResult:
    """A mode on a split, with the fastest layouts that fit.

    engine_nodes: nodes of the engines; 0: they are on the trainer's.  trainer_nodes: the others.
    cache_seqs: responses, on average half made, that the cache of an engine holds.
    """

    mode: SimulatedMode
    engine_nodes: int
    trainer_nodes: int
    candidate: Candidate
    simulation: Simulation
    cache_seqs: int


@dataclass(frozen=True, kw_only=True)
class ModesResult:
    """All modes on all splits.  refused: splits that no layout fits, in words.  lengths: of the responses."""

    rows: tuple[ModeResult, ...]
    refused: tuple[str, ...]
    lengths: Lengths

    @property
    def base(self) -> ModeResult:
        """What others are compared with: sync on shared devices, or where that does not fit the fastest sync."""
        sync = [row for row in self.rows if row.mode.max_staleness == 0]
        return min(sync, key=lambda row: (not row.mode.shared, row.simulation.step_s))

    @property
    def best(self) -> ModeResult:
        """The row of the shortest step."""
        return min(self.rows, key=lambda row: row.simulation.step_s)

    def ratio(self, row: ModeResult) -> float:
        """How many times as fast as ``base`` a row is."""
        return self.base.simulation.step_s / row.simulation.step_s


def num_nodes(run: RunConfig, cluster: ClusterConfig) -> int:
    """The nodes of ``run``, trainer and engines together."""
    if run.trainer.placement is Placement.colocated:
        return run.trainer.nnodes
    return run.trainer.nnodes + -(-run.rollout.layout.world_size // max(1, cluster.gpus_per_node))


def splits_of(nodes: int) -> tuple[int, ...]:
    """The numbers of engine nodes to try first: a quarter, a half and three quarters of ``nodes``."""
    return tuple(sorted({round(nodes * share) for share in (0.25, 0.5, 0.75)} & set(range(1, nodes))))


def compare_modes(
    run: RunConfig,
    model: ModelConfig,
    cluster: ClusterConfig,
    lengths: Lengths | None = None,
    *,
    others: Others = NONE,
    modes: Sequence[SimulatedMode] = SEPARATE_MODES,
    searches: bool = False,
    steps: int = 8,
) -> ModesResult:
    """Every mode on the splits of the run's nodes, each with the layouts of its own with which it is fastest.

    lengths: None: lognormal, with the mean that the plan assumes.  others: as in ``plan``.
    modes: of separate devices.  searches: beyond ``splits_of``, look for the fastest split of each mode, to a 32nd of
    the nodes.  steps: see ``simulate``.
    """
    assert cluster.gpus_per_node > 0, "layouts are searched for accelerators"
    lengths = lengths or Lognormal(mean_lengths(run.data)[1], run.data.max_response_length)
    comparison = _Comparison(run, model, cluster, others, lengths, steps)
    comparison.try_split(0, (SYNC_COLOCATED,))
    for engine_nodes in splits_of(comparison.nodes):
        comparison.try_split(engine_nodes, modes)
    for mode in modes if searches else ():
        comparison.search(mode)
    rows = sorted(comparison.rows, key=lambda row: row.engine_nodes)
    return ModesResult(rows=tuple(rows), refused=tuple(comparison.refused.values()), lengths=lengths)


class _Comparison:
    """The rows of ``compare_modes`` as they come.  refused: by the number of engine nodes."""

    def __init__(
        self,
        run: RunConfig,
        model: ModelConfig,
        cluster: ClusterConfig,
        others: Others,
        lengths: Lengths,
        steps: int,
    ) -> None:
        self._run = run
        self._model = model
        self._cluster = cluster
        self._others = others
        self._lengths = lengths
        self._steps = steps
        self._candidates: dict[int, list[Candidate]] = {}
        self.nodes = num_nodes(run, cluster)
        self.rows = list[ModeResult]()
        self.refused = dict[int, str]()

    def try_split(self, engine_nodes: int, modes: Sequence[SimulatedMode]) -> None:
        """Simulate ``modes`` with so many nodes of engines; 0: they share the trainer's."""
        candidates = self._promising(engine_nodes)
        if not candidates:
            where = f"{engine_nodes} nodes of engines" if engine_nodes else "engines on the trainer's devices"
            self.refused[engine_nodes] = f"{where}: no layout fits"
            return
        for mode in modes:
            rows = (self._simulated(mode, engine_nodes, each) for each in candidates)
            self.rows.append(min(rows, key=lambda row: row.simulation.step_s))

    def search(self, mode: SimulatedMode) -> None:
        """Move the fastest split of ``mode`` by an eighth of the nodes while that is faster, then by ever less."""
        distance = self.nodes // 8
        while distance >= max(1, self.nodes // 32):
            tried = {row.engine_nodes: row.simulation.step_s for row in self.rows if row.mode == mode}
            if not tried:
                return
            fastest = min(tried, key=lambda nodes: tried[nodes])
            near = {fastest - distance, fastest + distance} & set(range(1, self.nodes))
            untried = sorted(near - tried.keys() - self.refused.keys())
            for engine_nodes in untried:
                self.try_split(engine_nodes, (mode,))
            if not untried:
                distance //= 2

    def _simulated(self, mode: SimulatedMode, engine_nodes: int, candidate: Candidate) -> ModeResult:
        run = rl_run(candidate)
        mean = self._lengths.mean
        layout = run.rollout.layout
        work = workload(run, self._lengths)
        costs = engine_costs_of(run, self._model, self._cluster, mean)
        simulation = simulate_share(
            mode,
            work,
            costs,
            layout.num_engines * layout.engine_dp,
            trainer_costs(candidate, self._model, self._cluster),
            steps=self._steps,
        )
        return ModeResult(
            mode=mode,
            engine_nodes=engine_nodes,
            trainer_nodes=self.nodes - engine_nodes,
            candidate=candidate,
            simulation=simulation,
            cache_seqs=int(costs.capacity / (costs.slot + work.prompt + mean / 2)),
        )

    def _promising(self, engine_nodes: int) -> list[Candidate]:
        if engine_nodes not in self._candidates:
            run = _placed(self._run, self._cluster, self.nodes, engine_nodes)
            each = fastest_by_rollout(run, self._model, self._cluster, self._others)
            least = min((candidate.plan.seconds["generate"] for candidate in each), default=0.0)
            self._candidates[engine_nodes] = [
                candidate for candidate in each if candidate.plan.seconds["generate"] <= PROMISING * least
            ]
        return self._candidates[engine_nodes]


def rl_run(candidate: Candidate) -> RunConfig:
    """The run of ``candidate``, which has engines: fine-tuning has no modes."""
    assert isinstance(candidate.run, RunConfig)
    return candidate.run


def _placed(run: RunConfig, cluster: ClusterConfig, nodes: int, engine_nodes: int) -> RunConfig:
    """``run`` on ``nodes`` nodes, of which the engines have ``engine_nodes`` for themselves, or share all."""
    placement = Placement.separate if engine_nodes else Placement.colocated
    trainer = replace(run.trainer, placement=placement, nnodes=nodes - engine_nodes)
    per_node = cluster.gpus_per_node if engine_nodes else trainer.n_gpus_per_node
    devices = (engine_nodes or nodes) * per_node
    return replace(run, trainer=trainer, rollout=replace(run.rollout, tp=1, dp=devices, ep=1))


def simulate_share(
    mode: SimulatedMode,
    work: Workload,
    costs: EngineCosts,
    num_engines: int,
    trainer: TrainerCosts,
    *,
    steps: int,
) -> Simulation:
    """``simulate``, of many engines a share; see ``MOST_ENGINES``.  What is counted is that of the share."""
    few = max(MOST_ENGINES, ceil(LEAST_GROUPS * num_engines / work.groups))
    if few >= num_engines:
        return simulate(mode, work, costs, num_engines, trainer, steps=steps)
    groups = round(work.groups * few / num_engines)
    share = work.groups / groups
    less = replace(trainer, token_s=trainer.token_s * share)
    result = simulate(mode, replace(work, groups=groups), costs, few, less, steps=steps)
    return replace(result, samples_per_s=result.samples_per_s * share)


def workload(run: RunConfig, lengths: Lengths) -> Workload:
    """What a step of ``run`` draws; groups that dynamic sampling will drop are among it."""
    prompt = max(1, round(mean_lengths(run.data)[0]))
    groups = run.data.gen_batch_size or run.data.train_batch_size
    return Workload(groups=groups, samples=run.rollout.n + run.needs_greedy, prompt=prompt, lengths=lengths)


def engine_costs_of(run: RunConfig, model: ModelConfig, cluster: ClusterConfig, mean_response: float) -> EngineCosts:
    """The costs of an engine of ``run``, or of one replica of an engine whose experts span them."""
    device_bytes = int(cluster.gpu_memory_gib * GIB)
    room = serving(
        model, run.rollout, device_bytes=device_bytes, processes=ProcessMemory.of(cluster), lora=engine_lora(run, model)
    )
    rates = Rates.of(cluster, run.trainer.n_gpus_per_node, run.rollout.dtype)
    prompt, _ = mean_lengths(run.data)
    return engine_costs(model, run.rollout, room, rates, prompt + mean_response / 2)


def engine_costs(
    model: ModelConfig, config: RolloutConfig, room: Serving, rates: Rates, mean_length: float
) -> EngineCosts:
    """The terms of ``timing.generation_s`` for a decode step and for a token of a prompt.

    mean_length: tokens of a sequence that is read at once, for the share of attention.
    """
    layout = config.layout
    per_token = max(1, cache_bytes_per_token(model, config))
    row = BYTES[config.dtype] * model.hidden_size
    between = [0.0] * (config.max_num_seqs + 1)
    latency = decode_latency_s(model, config, rates)
    between_token = 0.0
    if rates.accelerator and layout.engine_size > rates.per_node:
        sizes = range(config.max_num_seqs + 1)
        reductions = [nodes_reduction_s(row * active, layout.engine_size, rates) for active in sizes]
        between = [2 * model.num_layers * seconds for seconds in reductions]
        between_token = between[-1] / config.max_num_seqs
    mean = max(1, round(mean_length))
    prefill = forward_flops(model, [mean]) / mean / layout.tp / compute_flops_rate(model, rates)
    return EngineCosts(
        fixed_s=tuple(latency + seconds for seconds in between),
        stream_s=tuple(_stream_s(model, config, rates)),
        token_s=per_token / rates.memory,
        product_s=2 * matmul_parameters(model) / layout.tp / rates.flops,
        prefill_s=prefill + between_token,
        capacity=max(0, room.cache) / per_token,
        slot=state_bytes(model, config) / per_token,
    )


def _stream_s(model: ModelConfig, config: RolloutConfig, rates: Rates) -> Iterator[float]:
    """By the number of running sequences, the seconds in which the weights that they touch are read."""
    size = BYTES[config.dtype]
    for active in range(config.max_num_seqs + 1):
        yield streamed_bytes(model, config, size, active) / rates.memory


def trainer_costs(candidate: Candidate, model: ModelConfig, cluster: ClusterConfig) -> TrainerCosts:
    """The plan's seconds of a step that do not depend on its tokens, and the others for each token that is drawn."""
    run = rl_run(candidate)
    seconds = dict(candidate.plan.seconds)
    del seconds["generate"]
    publish = seconds.pop("sync")
    save = seconds.pop("save", 0.0)
    rates = Rates.of(cluster, run.trainer.n_gpus_per_node, run.actor.precision, run.trainer.device_peak_tflops)
    updates = sum(
        updates_of(run, row) * optimizer_s(role_plan(row, model, run, cluster), rates) for row in run.trained_rows
    )
    mean = sum(mean_lengths(run.data))
    drawn = (run.data.gen_batch_size or run.data.train_batch_size) * (run.rollout.n + run.needs_greedy)
    return TrainerCosts(
        fixed_s=updates + save, token_s=(sum(seconds.values()) - updates) / (drawn * mean), publish_s=publish
    )
