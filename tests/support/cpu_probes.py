"""Small pieces of real Megatron code, each of which goes wrong on the CPU without one patch of ``parallel/cpu.py``.

A patched process cannot be unpatched, so every set of patches gets processes of its own: one process imports Megatron,
untouched, and forks two ranks for each set.  Their probes run one after another in one gloo group.
"""

from __future__ import annotations

import logging
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.fusions.fused_bias_swiglu import swiglu
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.optimizer import clip_grads, optimizer
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import mappings, random
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor
from torch._dynamo.callback import callback_handler

from mcore_rl.config.engine import Device, EngineConfig, Precision
from mcore_rl.config.parallel import parse_layout
from mcore_rl.parallel import cpu
from mcore_rl.parallel.cpu import PATCHES, Line, make_megatron_run_on_cpu
from mcore_rl.parallel.device import detect, device_of
from mcore_rl.parallel.groups import init_groups
from mcore_rl.parallel.launch import Rank
from mcore_rl.parallel.layout import Layout
from mcore_rl.training.engine import Engine
from tests.support import batches, models
from tests.support.replaced import replaced_and_held

FORK = multiprocessing.get_context("fork")
WORLD_SIZE = 2
COLLECTIVE_S = 30.0  # limit of one collective, for a rank that waits for one that failed
PROBES_S = 120.0  # limit of one set of patches


@dataclass(frozen=True)
class Probe:
    """``run`` needs ``patch``: without it, it fails in the function that ``line`` stands in, or by its own word."""

    patch: str
    line: Line
    run: Callable[[], None]


@dataclass(frozen=True)
class Failure:
    """Why a probe failed.

    by_its_own_word: it saw a wrong result.  passed: the functions of Megatron that the error came through, each as
    (path below ``megatron/core``, qualified name).
    """

    error: str
    by_its_own_word: bool
    passed: frozenset[tuple[str, str]]

    def came_through(self, line: Line) -> bool:
        """Whether ``line`` stands in a function that the error came through."""
        return (line.path, line.within) in self.passed


@dataclass(frozen=True)
class Report:
    """What the untouched process and its children found.

    failures: for each patch that was left out, and for None, per rank: by the probe's place in ``PROBES``.
    replaced, held: as in ``replaced_and_held``.  replaced_again: what patching a second time changes.
    """

    failures: dict[str | None, list[dict[int, Failure]]]
    replaced: list[str]
    held: list[str]
    replaced_again: list[str]


PROBES: list[Probe] = []


def probe(patch: str, path: str, code: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """The probe of the one line that ``patch`` answers in ``path`` and that has ``code`` in it."""
    (named,) = (patch_ for patch_ in PATCHES if patch_.name == patch)
    (line,) = (line for line in named.answers if line.path == path and code in line.code)

    def register(run: Callable[[], None]) -> Callable[[], None]:
        PROBES.append(Probe(patch, line, run))
        return run

    return register


# ---- the probes; all run on both ranks ----


def init_megatron(*, tp: int = 1, ep: int = 1, create_gloo_process_groups: bool = True) -> None:
    """Groups by Megatron's own defaults; no seed."""
    parallel_state.initialize_model_parallel(
        tp, expert_model_parallel_size=ep, create_gloo_process_groups=create_gloo_process_groups
    )


def settings(**changes: Any) -> TransformerConfig:
    wanted = dict(num_layers=2, hidden_size=8, num_attention_heads=2, add_bias_linear=False)
    return TransformerConfig(**(wanted | changes))


def rows(*numbers: float) -> Tensor:
    """[len, 2], each row filled with its number."""
    return torch.tensor(numbers, dtype=torch.float32)[:, None].repeat(1, 2)


@probe("current device", "tensor_parallel/layers.py", "current_device")
def make_a_weight() -> None:
    init_megatron(tp=2)
    layer = ColumnParallelLinear(4, 6, config=settings(perform_initialization=False), init_method=torch.nn.init.zeros_)
    assert layer.weight.shape == (3, 4)


@probe("current device", "tensor_parallel/mappings.py", "current_device")
def gather_equal_parts() -> None:
    gathered = mappings.gather_from_sequence_parallel_region(rows(dist.get_rank()), group=dist.group.WORLD)
    assert torch.equal(gathered, rows(0, 1))


@probe("current device", "tensor_parallel/random.py", "current_device")
def seed_the_tracker() -> None:
    init_megatron()
    random.model_parallel_cuda_manual_seed(1)


@probe("current device", "models/common/embeddings/rotary_pos_embedding.py", "current_device")
def make_a_rotary_embedding() -> None:
    init_megatron()
    RotaryEmbedding(kv_channels=4, rotary_percent=1.0)


@probe("current device", "distributed/param_and_grad_buffer.py", "current_device")
def make_gradient_buffers() -> None:
    init_megatron()
    DistributedDataParallel(settings(), DistributedDataParallelConfig(), torch.nn.Linear(2, 2))


@probe("synchronize", "pipeline_parallel/p2p_communication.py", "synchronize")
def send_to_the_next_stage() -> None:
    stages = P2PCommunicator(dist.group.WORLD, settings(pipeline_dtype=torch.float32))
    if dist.get_rank() == 0:
        stages.send_forward(rows(1, 2), is_last_stage=False)
    else:
        assert torch.equal(stages.recv_forward((2, 2), is_first_stage=False), rows(1, 2))


def dispatch() -> None:
    """Tokens 0 and 1 of both ranks to experts 1 and 0 (one on each rank), and back; rank 1 sends both to expert 0."""
    init_megatron(ep=2)
    experts = dict(num_moe_experts=2, moe_router_topk=1, moe_router_pre_softmax=True, expert_model_parallel_size=2)
    config = settings(moe_router_load_balancing_type="none", **experts)
    rank = dist.get_rank()
    dispatcher = MoEAlltoAllTokenDispatcher(1, [rank], config, ProcessGroupCollection.use_mpu_process_groups())
    goes_to_0 = torch.tensor([rank == 1, True])
    routing = torch.stack([goes_to_0, ~goes_to_0], dim=1)
    tokens = rows(10 * rank, 10 * rank + 1)
    hidden, probs = dispatcher.dispatch_preprocess(tokens, routing, routing.float())
    hidden, probs = dispatcher.token_dispatch(hidden, probs)
    arrived, counts, _ = dispatcher.dispatch_postprocess(hidden, probs)
    assert torch.equal(arrived, rows(1, 10, 11) if rank == 0 else rows(0))
    assert counts.tolist() == [len(arrived)]
    back = dispatcher.token_combine(dispatcher.combine_preprocess(arrived))
    assert torch.equal(dispatcher.combine_postprocess(back), tokens)


@probe("new stream", "transformer/moe/token_dispatcher.py", "Stream()")
def dispatch_with_a_new_stream() -> None:
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = None
    dispatch()


@probe("stream context", "transformer/moe/token_dispatcher.py", "torch.cuda.stream(")
def dispatch_where_torch_sees_a_gpu() -> None:
    real = torch.cuda._get_device_index
    torch.cuda._get_device_index = lambda *_: 0  # type: ignore[assignment]
    try:
        dispatch()
    finally:
        torch.cuda._get_device_index = real


probe("current stream", "transformer/moe/token_dispatcher.py", "current_stream")(dispatch)
probe("split sizes", "tensor_parallel/mappings.py", "all_to_all_single")(dispatch)


@probe("split sizes", "transformer/moe/moe_utils.py", "is_cuda")
def make_numpy() -> None:
    sizes = token_dispatcher.maybe_move_tensor_to_cpu(torch.tensor([3, 4]), as_numpy=True)
    assert not torch.is_tensor(sizes) and sizes.tolist() == [3, 4]


@probe("random state", "tensor_parallel/random.py", "random.get_rng_state")
def look_at_the_state() -> None:
    assert torch.equal(random._get_cuda_rng_state(), torch.get_rng_state())


@probe("random state", "tensor_parallel/random.py", "default_generators")
def set_the_state() -> None:
    random._set_cuda_rng_state(torch.get_rng_state())


@probe("random state", "tensor_parallel/random.py", "cuda.get_rng_state")
def add_a_state() -> None:
    random.CudaRNGStatesTracker().add("probe", 1)


@probe("queued calls", "tensor_parallel/random.py", "_lazy_call")
def repeat_random_numbers() -> None:
    state = torch.get_rng_state()
    first = torch.rand(3)
    random._set_cuda_rng_state(state)
    assert torch.equal(torch.rand(3), first), "the state was not set"


@probe("queued calls", "tensor_parallel/random.py", "manual_seed")
def seed_the_default_state() -> None:
    init_megatron(tp=2)
    random.model_parallel_cuda_manual_seed(5)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(5))), "not seeded"


@probe("random warning", "tensor_parallel/random.py", "CPU RNG state changed")
def fork_a_state() -> None:
    records: list[logging.LogRecord] = []
    logger, handler = logging.getLogger(random.__name__), logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    tracker = random.CudaRNGStatesTracker()
    tracker.add("probe", 1)
    with tracker.fork("probe"):
        torch.rand(1)
    logger.warning("something else")
    assert [record.getMessage() for record in records] == ["something else"], records


@probe("to cuda", "models/common/language_module/language_module.py", "cuda()")
def tie_the_output_over_two_stages() -> None:
    engine(models.dense(tie_output=True), "pp=2", trainable=False)


def engine(model: Any, layout: str = "", *, trainable: bool, precision: Precision = Precision.float32) -> Engine:
    parallel, platform = parse_layout(layout), detect(Device.cpu)
    groups = init_groups(Layout.of(parallel, WORLD_SIZE), platform, device_of(platform, 0), seed=1)
    config = EngineConfig(device=Device.cpu, precision=precision, microbatch_tokens=64)
    return Engine("probe", model, parallel, config, groups, platform, trainable=trainable)


@probe("factories", "pipeline_parallel/schedules.py", "cuda")
def run_a_forward_pass() -> None:
    model = models.dense(num_layers=1)
    engine(model, trainable=False).score(batches.ragged(model.vocab_size, lengths=(3, 4, 2, 5)))


@probe("factories", "optimizer/optimizer.py", "cuda")
@probe("optimizer type names", "optimizer/distrib_optimizer.py", "FloatTensor")
def build_an_optimizer() -> None:
    engine(models.dense(num_layers=1), trainable=True)


@probe("optimizer type names", "optimizer/distrib_optimizer.py", "model_param.type() in")
def build_an_optimizer_with_main_weights() -> None:
    built = engine(models.dense(num_layers=1), trainable=True, precision=Precision.bfloat16)
    assert built.optimizer is not None
    dtypes = {parameter.dtype for group in built.optimizer.megatron.param_groups for parameter in group["params"]}
    assert dtypes == {torch.float32}


@probe("optimizer type names", "optimizer/distrib_optimizer.py", "if param.type() in")
def mark_weights_whose_main_weights_are_elsewhere() -> None:
    built = engine(models.dense(num_layers=1), trainable=True, precision=Precision.bfloat16)
    parameters = [parameter for chunk in built.models for parameter in chunk.parameters()]
    assert all(parameter.main_param_sharded for parameter in parameters)  # type: ignore[attr-defined]
    elsewhere = [parameter for parameter in parameters if parameter.main_param is None]  # type: ignore[attr-defined]
    assert elsewhere, "every weight has a part on this rank: the probe proves nothing"


@probe("clip type names", "optimizer/clip_grads.py", "FloatTensor")
def clip_a_gradient() -> None:
    for module in (clip_grads, optimizer):
        parameter = torch.nn.Parameter(torch.zeros(2))
        parameter.grad = torch.tensor([3.0, 4.0])
        module.clip_grad_by_total_norm_fp32([parameter], 1.0, 5.0)
        torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]), rtol=1e-6, atol=0)  # norm + 1e-6
    assert parameter.grad.type() == "torch.FloatTensor", "the names are changed for good"


@probe("uneven gather", "tensor_parallel/mappings.py", "all_gather(")
def gather_uneven_parts() -> None:
    """Forward and backward, against numbers worked out by hand; then with a rank, and with all, without rows."""
    rank = dist.get_rank()
    mine = (rows(1) if rank == 0 else rows(2, 3)).requires_grad_()
    gathered = mappings.gather_from_sequence_parallel_region(mine, group=dist.group.WORLD, output_split_sizes=[1, 2])
    assert torch.equal(gathered, rows(1, 2, 3))
    gathered.backward(rows(10, 20, 30) if rank == 0 else rows(100, 200, 300))
    assert mine.grad is not None and torch.equal(mine.grad, rows(110) if rank == 0 else rows(220, 330))
    for sizes, whole in (([2, 0], rows(1, 2)), ([0, 3], rows(1, 2, 3)), ([0, 0], rows())):
        part = whole[: sizes[0]] if rank == 0 else whole[sizes[0] :]
        assert torch.equal(mappings._gather_along_first_dim(part, dist.group.WORLD, sizes), whole)


@probe("create group", "parallel_state.py", "new_group")
def make_groups() -> None:
    init_megatron(create_gloo_process_groups=False)
    members = [tuple(sorted(ranks)) for ranks in dist.distributed_c10d._world.pg_group_ranks.values()]
    members.remove(tuple(range(WORLD_SIZE)))  # the default group, which is not Megatron's
    assert len(set(members)) == len(members), f"several groups of the same ranks: {members}"


@probe("jit fuser", "jit.py", "torch.compile")
def run_a_fused_activation() -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("compiling")

    callback_handler.register_start_callback(refuse)
    swiglu(torch.ones(2, 4))


# ---- running them ----


def run_all(_: Rank) -> Report:
    """Every probe with all patches, and without its own; and what all patches together replace."""
    assert not cpu._applied, "this process must fork others that are untouched"
    failures = {without: run_set(without) for without in (None, *(patch.name for patch in PATCHES))}
    reader, writer = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_compare, args=(writer,))
    process.start()
    writer.close()
    report = Report(failures, *reader.recv())
    process.join()
    return report


def _compare(writer: Connection) -> None:
    replaced, held = replaced_and_held(make_megatron_run_on_cpu)
    writer.send((replaced, held, replaced_and_held(make_megatron_run_on_cpu)[0]))


def run_set(without: str | None) -> list[dict[int, Failure]]:
    """The failures of each rank with all patches but ``without``; all probes run where none is left out."""
    chosen = [index for index, probe in enumerate(PROBES) if without in (None, probe.patch)]
    received = []
    with tempfile.TemporaryDirectory() as folder:
        pipes = [FORK.Pipe(duplex=False) for _ in range(WORLD_SIZE)]
        processes = [
            FORK.Process(target=_run_rank, args=(rank, folder, without, chosen, writer))
            for rank, (_, writer) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        for process, (reader, writer) in zip(processes, pipes, strict=True):
            writer.close()
            assert reader.poll(PROBES_S), f"the probes without {without!r} hang"
            received.append(reader.recv())
            process.join()
    return received


def _run_rank(rank: int, folder: str, without: str | None, chosen: list[int], writer: Connection) -> None:
    make_megatron_run_on_cpu(() if without is None else (without,))
    store = dist.FileStore(str(Path(folder) / "store"), WORLD_SIZE)
    limit = timedelta(seconds=COLLECTIVE_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=limit)
    failures = {}
    for index in chosen:
        try:
            PROBES[index].run()
        except Exception as error:  # noqa: BLE001  # what it is, is the result
            failures[index] = _failure(error)
        _meet(store, f"after probe {index}", rank)
        parallel_state.destroy_model_parallel()
    writer.send(failures)
    writer.close()
    dist.barrier()
    dist.destroy_process_group()


def _meet(store: dist.Store, name: str, rank: int) -> None:
    """Wait for the other rank by the store, as a collective of the probe may have failed.

    A gloo group that one rank leaves while the other still connects it fails there with "Connection closed by peer".
    """
    store.set(f"{name}: {rank}", "")
    store.wait([f"{name}: {rank}" for rank in range(WORLD_SIZE)])


def _failure(error: Exception) -> Failure:
    passed, last = set(), None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        last = frame.f_code
        _, below, path = last.co_filename.partition("megatron/core/")
        if below:
            passed.add((path, last.co_qualname))
    by_its_own_word = isinstance(error, AssertionError) and last is not None and last.co_filename == __file__
    return Failure(f"{type(error).__name__}: {error}", by_its_own_word, frozenset(passed))
