"""Runs every operation of a rehearsal, on fake tensors or on real ones, and writes the ledger.

Two memories, told apart by the device of a tensor, as on an accelerator:

- ``DEVICE`` is torch's CPU with an index.  Its tensors are fake: a shape, a dtype, no data.  torch refuses to mix them
  with the host's, as it does for an accelerator.
- The host is torch's CPU without an index.  Its tensors are real, so code that plans on the host runs as it is.

A copy from the device to the host gives a fake tensor on the host.  A read of one number of the device is answered
(True, 1.0, or 0) and counted: the host would wait there.  Nothing here knows Megatron or this project's engine.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import mcore_rl
from mcore_rl.rehearsal.ledger import (
    Collect,
    Collective,
    Ledger,
    MemoryBlock,
    MemoryKind,
    Read,
    RehearsalPhase,
    collective,
    group_name,
    wire_bytes,
)

DEVICE = torch.device("cpu", 0)
HOST = torch.device("cpu")

HERE = str(Path(__file__).parent)
ROOT = str(Path(mcore_rl.__file__).parent)
PROJECT = f"{ROOT}/"
MEGATRON = "/megatron/core/"

aten = torch.ops.aten
_DEVICE_OF = torch.ops.prim.device.default
_GROUPED_PRODUCT = aten._grouped_mm.default  # torch's table of operations lacks it
_READS_ONE = aten._local_scalar_dense.default
_INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)
# In place, but not of the elements.
_CHANGE_SHAPES = (
    aten.resize_.default,
    aten.set_.source_Storage,
    aten.set_.source_Storage_storage_offset,
    aten.set_.source_Tensor,
    aten.squeeze_.dim,
    aten.unsqueeze_.default,
    aten.t_.default,
    aten.transpose_.default,
    aten.as_strided_.default,
    aten.squeeze_.default,
    aten.detach_.default,
)
KNOWN = 64  # numbers of the host that go to the device: so many of a tensor are remembered
_COPIES = (aten._to_copy.default, aten.copy_.default)


class DeviceMeter(TorchDispatchMode):
    """Writes ``ledger``.  Enter it under ``fake``.

    num_selected: elements that the next ``masked_select`` gives; None: all.
    """

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.fake = fake
        self.ledger = Ledger()
        self.num_selected: int | None = None
        self.per_step = True
        self._phase = ""
        self._blocks: dict[int, MemoryBlock] = {}
        self._remembered: dict[Any, tuple[torch.Size, tuple[int, ...], torch.dtype]] = {}

    # ---- what the ledger is told of the course of things ----

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Within: ``name`` is the current phase."""
        begin = self.ledger.now
        self._phase = name
        try:
            yield
        finally:
            self.ledger.phases.append(RehearsalPhase(name, begin, self.ledger.now + 1))
            self.ledger.now += 1
            self._phase = ""

    def host_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> FakeTensor:
        """A tensor of the host that has no data: what is large there, and of which copies alone are rehearsed."""
        return FakeTensor(self.fake, torch.empty(shape, dtype=dtype, device="meta"), HOST)

    def mark(
        self, tensors: Iterable[Tensor], kind: MemoryKind, *, over: Sequence[MemoryKind] = tuple(MemoryKind)
    ) -> None:
        """Note that the memory of ``tensors`` is ``kind``.  over: the kinds that this replaces."""
        for tensor in tensors:
            if isinstance(tensor, FakeTensor):
                block = self._blocks.get(tensor.untyped_storage()._cdata)
                if block is not None and block.kind in over:
                    block.kind = kind

    def keep(self, tensor: Tensor) -> Tensor:
        """As a hook of autograd: ``tensor`` is kept for backward."""
        self.mark((tensor,), MemoryKind.activations, over=(MemoryKind.temporary,))
        return tensor

    def read(self, operation: str) -> None:
        """Count a read of the device by the host, at the caller's place."""
        path, line, function = _place()
        self.ledger.reads[Read(self._phase, path, line, function, operation, self.per_step)] += 1

    def compute(self, operations: float, name: str) -> None:
        """Count floating-point operations."""
        self.ledger.operations[self._phase, self.per_step, name] += int(operations)

    def track(self, result: Any, operation: str) -> None:
        """Count the memory of the tensors in ``result`` that is new."""
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if _is_on_device(tensor):
                self._track(tensor, operation)
            elif isinstance(tensor, (tuple, list)):
                self.track(tensor, operation)

    # ---- operations ----

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation; see the module."""
        if func is _DEVICE_OF:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else HOST
        kwargs = kwargs or {}
        if not _touches_device(args, kwargs):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        self.ledger.now += 1
        if func.namespace == "c10d":
            return self._communicate(func, args, kwargs)
        if func is _READS_ONE:
            return self._item(args[0])
        if func is aten.add.Tensor and _backward_adds_up():
            return args[0]
        # Their results have as many elements as the data say: the host waits to know how many.
        if func is aten.masked_select.default:
            return self._masked_select(args)
        if func is aten.nonzero.default:
            self._waits(args[0], "nonzero")
            result = args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
            self.track(result, "nonzero")
            return result
        if func in _INDEXED and not (len(args) > 2 and args[2].numel() == 1):  # one number: a masked fill, no wait
            args = self._without_masks(func, args)
        if func in _COPIES:
            copied = self._copy_between(func, args, kwargs)
            if copied is not None:
                return copied
        if func is _GROUPED_PRODUCT and args[0].dtype is not torch.bfloat16:
            result = _grouped(*args, **kwargs)
        else:
            result = self._run(func, args, kwargs)
        self.track(result, func.__name__)
        if func is _GROUPED_PRODUCT:
            self.compute(2 * args[0].numel() * args[1].shape[-1], func.__name__)
        if func._overloadpacket in flop_registry:
            self.compute(flop_registry[func._overloadpacket](*args, **kwargs, out_val=result), func.__name__)
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``func`` on fake tensors, as torch's mode does it, but several times faster where all are on the device.

        An operation in place changes nothing that a fake tensor has.  For all others torch's mode asks a cache with a
        key that costs more than most operations.  Here the kernel for shapes runs at once, and what has new memory is
        remembered by the shapes that went in.
        """
        if func.namespace != "aten" or "device" in kwargs or not _all_on_device(args, kwargs):
            return func(*args, **kwargs)
        if func.__name__.partition(".")[0].endswith("_") and func not in _CHANGE_SHAPES:
            return args[0]
        key = (func, _shapes(args), _shapes(tuple(kwargs.items())))
        shaped = self._remembered.get(key)
        with in_kernel_invocation_manager(self.fake):
            if shaped is not None:
                return FakeTensor(self.fake, torch.empty_strided(*shaped[:2], dtype=shaped[2], device="meta"), DEVICE)
            try:
                result = func(*args, **kwargs)
            except NotImplementedError:  # there is no kernel for shapes alone
                result = None
        if result is None:
            return func(*args, **kwargs)
        wrapped = self._wrapped(result)
        if isinstance(result, Tensor) and wrapped is not result and _is_new(func, wrapped, args):
            self._remembered[key] = (wrapped.shape, wrapped.stride(), wrapped.dtype)
        return wrapped

    def _wrapped(self, result: Any) -> Any:
        if isinstance(result, (tuple, list)):
            return type(result)(self._wrapped(each) for each in result)
        if isinstance(result, Tensor) and not isinstance(result, FakeTensor):
            return FakeTensor(self.fake, result, DEVICE)
        return result

    def _track(self, tensor: FakeTensor, operation: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._blocks:
            return
        block = MemoryBlock(storage.nbytes(), self.ledger.now, operation, "{}:{} {}".format(*_place()))
        self._blocks[key] = block
        self.ledger.blocks.append(block)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        block = self._blocks.pop(key, None)
        if block is not None:
            self.ledger.now += 1
            block.death = self.ledger.now

    def _waits(self, tensor: Tensor, operation: str) -> None:
        if _is_on_device(tensor):
            self.read(operation)

    def values(self, tensor: FakeTensor) -> Any:
        """``tensor.tolist()``: one read."""
        self._waits(tensor, "tolist")
        with unset_fake_temporarily():
            known = tensor.constant
            return (torch.full(tensor.shape, _answer(tensor.dtype)) if known is None else known).tolist()

    def _item(self, tensor: FakeTensor) -> bool | float | int:
        self._waits(tensor, "item")
        if tensor.constant is None:
            return _answer(tensor.dtype)
        with unset_fake_temporarily():
            return tensor.constant.item()  # type: ignore[no-any-return]

    def _masked_select(self, args: tuple[Any, ...]) -> Tensor:
        values, mask = args
        self._waits(mask, "masked_select")
        result: Tensor = values.new_empty((mask.numel() if self.num_selected is None else self.num_selected,))
        self.track(result, "masked_select")
        return result

    def _without_masks(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """An index by a mask is one by the places where it is true: here all of them."""
        indices = list(args[1])
        for place, index in enumerate(indices):
            if isinstance(index, FakeTensor) and index.dtype is torch.bool:
                self._waits(index, func.__name__)
                assert index.dim() == 1, "masks of more dimensions are not rehearsed"
                indices[place] = index.new_empty(index.shape, dtype=torch.int64)
        return (args[0], indices, *args[2:])

    def _copy_between(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A copy from the device to the host, or of a new tensor to the device; None if it is another one."""
        if func is aten.copy_.default:
            target = args[0]
            source = args[1]
            if _is_on_device(target) or not _is_on_device(source):
                return None
            self._waits(source, "copy to the host")
            return target
        target = kwargs.get("device")
        source = args[0]
        if target is None or (target == DEVICE) is _is_on_device(source):
            return None
        if target != DEVICE:
            self._waits(source, "copy to the host")
            return func(*args, **kwargs)
        made = torch.empty(source.shape, dtype=kwargs.get("dtype") or source.dtype, device=DEVICE)
        self.track(made, "copy to the device")
        if not isinstance(source, FakeTensor) and source.numel() <= KNOWN:
            assert isinstance(made, FakeTensor)
            with unset_fake_temporarily():
                made.constant = source.clone()
        return made

    # ---- collectives ----

    def _communicate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func.__name__
        kind = collective(name)
        group = next((_group(arg) for arg in args if isinstance(arg, torch.ScriptObject) and _group(arg)), None)
        if kind is not None and group is not None:
            payload = _payload(kind, args)
            wire = wire_bytes(kind, payload, group.size())
            key = Collective(self._phase, group_name(group.group_desc), group.size(), kind.value, self.per_step)
            self.ledger.send(key, payload, wire)
        if "coalesced" in name:  # torch's fake backend has none of these
            work = FakeWork().boxed()  # type: ignore[attr-defined]
            return work if len(func._schema.returns) == 1 else (args[0], work)
        known = [(each, each.constant) for each in tree_leaves(args[0]) if isinstance(each, FakeTensor)]
        result = func(*args, **kwargs)
        for tensor, constant in known:  # other ranks know what this one knows
            tensor.constant = constant
        return result


def _shapes(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What the shape of a result depends on: of tensors shape, strides and dtype; all else as it is."""
    return tuple(
        (each.shape, each.stride(), each.dtype)
        if isinstance(each, Tensor)
        else _shapes(tuple(each))
        if isinstance(each, (list, tuple))
        else (type(each), each)  # 1, 1.0 and True are equal, and give other dtypes
        for each in args
    )


def _is_new(func: Any, result: Tensor, args: tuple[Any, ...]) -> bool:
    """Whether ``result`` has memory of its own."""
    if any(each.alias_info is not None for each in func._schema.returns):
        return False
    own = result.untyped_storage()._cdata
    return all(each.untyped_storage()._cdata != own for each in tree_leaves(args) if isinstance(each, Tensor))


def _all_on_device(args: Iterable[Any], kwargs: dict[str, Any]) -> bool:
    """Whether all tensors are on the device, and there is one."""
    there = False
    for arg in (*args, *kwargs.values()):
        for each in arg if isinstance(arg, (list, tuple)) else (arg,):
            if isinstance(each, Tensor):
                if not _is_on_device(each):
                    return False
                there = True
    return there


def _answer(dtype: torch.dtype) -> bool | float | int:
    """The number that an unknown one is taken for."""
    if dtype is torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 0


def _group(boxed: Any) -> dist.ProcessGroup | None:
    try:
        return dist.ProcessGroup.unbox(boxed)
    except RuntimeError:  # another object, such as a reduction
        return None


def _payload(kind: Collect, args: tuple[Any, ...]) -> int:
    """Bytes of the whole tensor: the larger of what goes in and what comes out; of an all-to-all, what goes in."""
    sizes = [sum(each.nbytes for each in tree_leaves(arg) if isinstance(each, Tensor)) for arg in args[:2]]
    return sizes[1] if kind is Collect.all_to_all else max(sizes)


def _is_on_device(tensor: Any) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.fake_device == DEVICE


def _touches_device(args: Iterable[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operation has fake tensors, or makes one on the device."""
    for arg in args:
        if isinstance(arg, FakeTensor):
            return True
        if isinstance(arg, (list, tuple)) and any(isinstance(each, FakeTensor) for each in arg):
            return True
    for arg in kwargs.values():
        if isinstance(arg, FakeTensor) or (isinstance(arg, torch.device) and arg == DEVICE):
            return True
    return False


def _backward_adds_up() -> bool:
    """Whether autograd adds up two gradients of a tensor: in place, but for subclasses (torch's input_buffer.cpp)."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_name in ("inner", "_fn"):  # what torch wraps modes in
        frame = frame.f_back
    return frame.f_code.co_name == "_engine_run_backward"


def _place() -> tuple[str, int, str]:
    """(path, line, function) of the innermost line of this project or of Megatron, outside of the rehearsal."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PROJECT):
            if not name.startswith(HERE):
                return f"mcore_rl/{name[len(PROJECT) :]}", frame.f_lineno, frame.f_code.co_name
        elif MEGATRON in name:
            return f"megatron/core/{name.partition(MEGATRON)[2]}", frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back
    return "", 0, ""


def _grouped(left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """What a grouped product makes in other precisions than bfloat16, which the CPU has and torch's shapes refuse."""
    if right.dim() == 3:  # rows, by the matrix of their group
        return left.new_empty(left.shape[0], right.shape[2])
    return left.new_empty(len(offs), left.shape[0], right.shape[1])  # a sum of outer products for each group
