"""Patches that let unmodified megatron-core (``MEGATRON_VERSIONS``) run on the CPU over gloo.

Megatron assumes a CUDA device in about a hundred places.  Each ``Patch`` in ``PATCHES`` covers one thing that it asks
of the device, and names lines of Megatron that need it; ``tests/parallel/test_cpu.py`` fails when such a line has moved
or no longer needs the patch.  Nothing here runs on an accelerator, and no patch changes what is computed, only where.
GPU features that this package never turns on in Megatron (overlapped reductions, CUDA graphs) are not patched.

This is the one module of the package that changes other people's modules; its changes to torch hold for the whole
process.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._device

from mcore_rl.config.megatron_versions import MEGATRON_VERSIONS, megatron_version
from mcore_rl.ground.errors import DeviceError

CPU = torch.device("cpu")

# Environment of a process that computes on the CPU.  Importing Megatron makes torch.compile load its compilers, 1.4 s
# and 43 MB per process; compiling for Megatron or vLLM then takes 5 to 30 s and gains nothing on the CPU.
UNCOMPILED = {"TORCHDYNAMO_DISABLE": "1"}


@dataclass(frozen=True)
class Line:
    """A line of megatron-core that fails on the CPU.

    path: below ``megatron/core``.  within: the qualified name of the function that it stands in.  code: a part of it.
    """

    path: str
    within: str
    code: str


@dataclass(frozen=True)
class Patch:
    """One patch.  answers: lines that need it, one of every kind."""

    name: str
    answers: tuple[Line, ...]
    apply: Callable[[], None]


def _patch(*answers: Line) -> Callable[[Callable[[], None]], Patch]:
    """Make a patch of a function, which applies it, has its name, and says what goes wrong without it."""

    def named(apply: Callable[[], None]) -> Patch:
        return Patch(apply.__name__.replace("_", " "), answers, apply)

    return named


def _replace(owner: Any, name: str, replacement: Any) -> None:
    assert hasattr(owner, name), f"there is no {name} to replace"
    setattr(owner, name, replacement)


@_patch(
    Line("tensor_parallel/layers.py", "ColumnParallelLinear.__init__", "device=torch.cuda.current_device()"),
    Line("tensor_parallel/mappings.py", "_gather_along_first_dim", "device=torch.cuda.current_device()"),
    Line("tensor_parallel/random.py", "_set_cuda_rng_state.<locals>.cb", "idx = torch.cuda.current_device()"),
    Line("models/common/embeddings/rotary_pos_embedding.py", "RotaryEmbedding.__init__", "torch.cuda.current_device()"),
    Line("distributed/param_and_grad_buffer.py", "_ParamAndGradBuffer.__init__", "device=torch.cuda.current_device()"),
)
def current_device() -> None:
    """Megatron puts tensors on the current CUDA device, and there is none."""
    _replace(torch.cuda, "current_device", lambda: CPU)


@_patch(Line("pipeline_parallel/p2p_communication.py", "P2PCommunicator._communicate", "torch.cuda.synchronize()"))
def synchronize() -> None:
    """Megatron waits for a CUDA device, and there is none."""
    _replace(torch.cuda, "synchronize", lambda device=None: None)


class _Event:
    """An event that has already happened."""

    def synchronize(self) -> None: ...


class _Stream:
    """A stream of a device that runs everything in order."""

    def wait_stream(self, stream: _Stream) -> None: ...

    def record_event(self) -> _Event:
        return _Event()


@_patch(Line("transformer/moe/token_dispatcher.py", "MoEAlltoAllTokenDispatcher.__init__", "torch.cuda.Stream()"))
def new_stream() -> None:
    """Megatron makes a stream of a CUDA device, and there is none."""
    _replace(torch.cuda, "Stream", _Stream)


@_patch(
    Line(
        "transformer/moe/token_dispatcher.py",
        "MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize",
        "torch.cuda.current_stream()",
    ),
)
def current_stream() -> None:
    """Megatron asks a CUDA device for its stream, and there is none."""
    stream = _Stream()
    _replace(torch.cuda, "current_stream", lambda device=None: stream)


@_patch(
    Line(
        "transformer/moe/token_dispatcher.py",
        "MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize",
        "torch.cuda.stream(self.cuda_dtoh_stream)",
    ),
)
def stream_context() -> None:
    """Megatron enters that stream, which torch ignores without a GPU; where it sees one, it wants one of its own."""
    _replace(torch.cuda, "stream", lambda stream: contextlib.nullcontext())


class _DefaultGenerators:
    """``torch.cuda.default_generators[i]``: every index is the CPU's one generator."""

    def __getitem__(self, _: object) -> torch.Generator:
        return torch.default_generator


@_patch(
    Line("tensor_parallel/random.py", "_get_cuda_rng_state", "torch.cuda.random.get_rng_state(device=device)"),
    Line("tensor_parallel/random.py", "_set_cuda_rng_state.<locals>.cb", "torch.cuda.default_generators[idx]"),
    Line("tensor_parallel/random.py", "CudaRNGStatesTracker.add", "torch.cuda.get_rng_state()"),
)
def random_state() -> None:
    """Megatron keeps the state of a CUDA generator, and there is none; the CPU's takes its place."""
    for owner in (torch.cuda, torch.cuda.random):
        _replace(owner, "get_rng_state", lambda device=None: torch.get_rng_state())
    _replace(torch.cuda, "default_generators", _DefaultGenerators())


@_patch(
    Line("tensor_parallel/random.py", "_set_cuda_rng_state", "_lazy_call(cb)"),
    Line("tensor_parallel/random.py", "model_parallel_cuda_manual_seed", "torch.cuda.manual_seed(data_parallel_seed)"),
)
def queued_calls() -> None:
    """torch queues calls until CUDA is initialised, that is for ever: no seed and no forked state would be set."""
    from megatron.core.tensor_parallel import random

    _replace(random, "_lazy_call", lambda callback: callback())
    _replace(torch.cuda, "manual_seed", lambda seed: torch.default_generator.manual_seed(seed))


@_patch(Line("tensor_parallel/random.py", "CudaRNGStatesTracker.fork", "CPU RNG state changed within GPU RNG context"))
def random_warning() -> None:
    """Megatron warns at every fork that the CPU's generator moved, which here is the point."""

    # The CPU's generator is also the "CUDA" one, so a forked CUDA state always changes it; the fork restores it.
    class _NotAboutTheSharedGenerator(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            return "CPU RNG state changed" not in record.getMessage()

    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_NotAboutTheSharedGenerator())


@_patch(
    Line(
        "models/common/language_module/language_module.py",
        "LanguageModule.setup_embeddings_and_output_layer",
        "weight.data.cuda()",
    ),
)
def to_cuda() -> None:
    """Megatron moves tensors to a device that is not there."""
    _replace(torch.Tensor, "cuda", lambda self, device=None, non_blocking=False: self)


@_patch(
    Line(
        "pipeline_parallel/schedules.py",
        "forward_backward_no_pipelining",
        'torch.zeros([], dtype=torch.int, device="cuda")',
    ),
    Line(
        "optimizer/optimizer.py",
        "MixedPrecisionOptimizer.__init__",
        "torch.tensor([1.0], dtype=torch.float, device='cuda')",
    ),
)
def factories() -> None:
    """Megatron creates tensors on a device that is not there."""

    # Patch only the two factories that Megatron calls so, and look only at keywords: every tensor passes through here.
    def on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(factory)
        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            if kwargs.get("device") == "cuda":
                kwargs["device"] = CPU
            return factory(*args, **kwargs)

        return make

    # ``with torch.device("meta")`` looks functions up in a set that torch builds from its module at first use
    # (utils/_device.py:14, 2.13).  The set must hold the real ones, or a patched ``torch.tensor`` ignores the context:
    # transformers' from_pretrained then leaves its rotary frequencies uninitialised (modeling_utils.py:250, 5.19).
    torch.utils._device._device_constructors()
    _replace(torch, "tensor", on_cpu(torch.tensor))
    _replace(torch, "zeros", on_cpu(torch.zeros))


@contextlib.contextmanager
def _cuda_type_names() -> Iterator[None]:
    """Within: ``tensor.type()`` of a CPU tensor gives the CUDA name of its type."""
    real = torch.Tensor.type

    def cuda_type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return real(self, dtype, *args, **kwargs)
        return real(self).replace("torch.", "torch.cuda.")

    torch.Tensor.type = cuda_type  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.Tensor.type = real  # type: ignore[method-assign]


def _with_cuda_type_names(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _cuda_type_names():
            return function(*args, **kwargs)

    return call


@_patch(
    Line(
        "optimizer/distrib_optimizer.py",
        "DistributedOptimizer._build_model_and_main_param_groups",
        "model_param.type() in ['torch.cuda.HalfTensor',",
    ),
    Line(
        "optimizer/distrib_optimizer.py",
        "DistributedOptimizer._build_model_and_main_param_groups",
        "model_param.type() == 'torch.cuda.FloatTensor'",
    ),
    Line(
        "optimizer/distrib_optimizer.py",
        "DistributedOptimizer.__init__",
        "if param.type() in ['torch.cuda.HalfTensor',",
    ),
)
def optimizer_type_names() -> None:
    """The distributed optimizer knows parameters only as torch.cuda.FloatTensor and kin."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    _replace(DistributedOptimizer, "__init__", _with_cuda_type_names(DistributedOptimizer.__init__))


@_patch(
    Line("optimizer/clip_grads.py", "clip_grad_by_total_norm_fp32", "param.grad.type() == 'torch.cuda.FloatTensor'")
)
def clip_type_names() -> None:
    """The clipping asserts that gradients are torch.cuda.FloatTensor."""
    from megatron.core.optimizer import clip_grads, optimizer

    clip = _with_cuda_type_names(clip_grads.clip_grad_by_total_norm_fp32)
    for module in (clip_grads, optimizer):
        _replace(module, "clip_grad_by_total_norm_fp32", clip)


@_patch(
    Line("transformer/moe/moe_utils.py", "maybe_move_tensor_to_cpu", "torch.is_tensor(tensor) and tensor.is_cuda"),
    Line("tensor_parallel/mappings.py", "_AllToAll.forward", "torch.distributed.all_to_all_single("),
)
def split_sizes() -> None:
    """The dispatcher converts all-to-all split sizes to numpy only when they come from a GPU."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    for module in (moe_utils, token_dispatcher):
        _replace(module, "maybe_move_tensor_to_cpu", to_host)


@_patch(Line("jit.py", "enable_jit_fuser", "jit_fuser = torch.compile"))
def jit_fuser() -> None:
    """Megatron compiles small functions with a C++ compiler at first use: half a minute a process, for nothing."""
    import torch._dynamo

    _replace(torch._dynamo.config, "disable", True)


@_patch(
    Line("tensor_parallel/mappings.py", "_gather_along_first_dim", "torch.distributed.all_gather(output_tensor_list")
)
def uneven_gather() -> None:
    """Megatron gathers parts of different sizes, which NCCL and RCCL can and gloo cannot."""
    from megatron.core.tensor_parallel import mappings

    gather = mappings._gather_along_first_dim

    @functools.wraps(gather)
    def gather_uneven(input_: Any, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        padded = input_.new_zeros(max(sizes), *input_.shape[1:])
        padded[: input_.shape[0]] = input_
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    _replace(mappings, "_gather_along_first_dim", gather_uneven)


@_patch(Line("parallel_state.py", "create_group", "torch.distributed.new_group(**kwargs)"))
def create_group() -> None:
    """Megatron makes 16 or more groups a rank, most alike; each gloo group keeps three polling threads for ever."""
    from megatron.core import parallel_state

    create = parallel_state.create_group
    shared: dict[tuple[int, ...], Any] = {}
    world: list[Any] = [None]

    @functools.wraps(create)
    def create_once(ranks: list[int], *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend") is not None:  # Megatron's second set of groups, over gloo: it destroys these itself
            return create(ranks, *args, **kwargs)
        if world[0] is not torch.distributed.group.WORLD:  # a new default group: groups over the old one are dead
            world[0] = torch.distributed.group.WORLD
            shared.clear()
        if tuple(ranks) not in shared:
            shared[tuple(ranks)] = create(ranks, *args, **kwargs)
        return shared[tuple(ranks)]

    _replace(parallel_state, "create_group", create_once)


PATCHES = (
    current_device,
    synchronize,
    new_stream,
    current_stream,
    stream_context,
    random_state,
    queued_calls,
    random_warning,
    to_cuda,
    factories,
    optimizer_type_names,
    clip_type_names,
    split_sizes,
    jit_fuser,
    uneven_gather,
    create_group,
)

_applied = False


def make_megatron_run_on_cpu(without: Collection[str] = ()) -> None:
    """Apply every patch, once; only runs on the CPU and rehearsals call this.  without: names of patches to skip.

    Raises DeviceError if another megatron-core is installed: the patches answer to lines of those that are known.
    """
    global _applied
    if _applied:
        return
    installed = megatron_version()
    if installed not in MEGATRON_VERSIONS:
        raise DeviceError(
            f"megatron-core {installed} on the CPU: only {' and '.join(MEGATRON_VERSIONS)} are known to run. "
            f"Install megatron-core=={MEGATRON_VERSIONS[-1]}, or use an accelerator."
        )
    for patch in PATCHES:
        if patch.name not in without:
            patch.apply()
    _applied = True
