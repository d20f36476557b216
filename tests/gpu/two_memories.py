"""A second memory, pretended: which tensors would live on the accelerator, and which operations would mix the two.

``TwoMemories`` computes everything on the CPU, but answers ``tensor.device`` and the device arguments of torch's Python
functions as if there were an accelerator, and notes every operation that a real one would refuse because an operand was
left on the host.  It sees what Python calls: forward passes, and backward passes as far as they are Python.  Gradients
that autograd's own kernels make are unknown to it, so it judges nothing while autograd runs.
"""

from __future__ import annotations

import traceback
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

THERE, HOST = torch.device("cuda", 0), torch.device("cpu")
# They move between memories, or only look at the form of a tensor.
_MIXING_IS_FINE = {"copy_", "set_", "__set__", "_has_compatible_shallow_copy_type", "is_set_to"}
_NO_RESULT = {"untyped_storage", "size", "dim", "numel", "stride", "data_ptr", "storage_offset"}


class TwoMemories(TorchFunctionMode):
    """``mixed`` counts the operations that would have failed, by name and the three innermost places in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed: Counter[str] = Counter()
        # By address of the storage, which is kept alive so that no other gets its address.
        self._there: dict[int, torch.UntypedStorage] = {}

    def is_there(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lives on the pretended accelerator."""
        return tensor.untyped_storage()._cdata in self._there

    def _mark(self, result: Any) -> Any:
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._there[storage._cdata] = storage
        return result

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), str(getattr(func, "__name__", func))
        if func == torch.Tensor.device.__get__:
            return THERE if self.is_there(args[0]) else HOST
        if func == torch.Tensor.is_cuda.__get__:
            return self.is_there(args[0])
        if func is torch.Tensor.type and len(args) == 1:
            answer = func(*args, **kwargs)
            return answer.replace("torch.", "torch.cuda.") if self.is_there(args[0]) else answer
        if func is torch.autograd.backward:
            return self._backward(*args, **kwargs)
        kwargs.pop("pin_memory", None)
        if func in (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda):
            return self._move(func, args, kwargs)
        wanted = kwargs.get("device")
        if wanted is not None:
            kwargs["device"] = HOST
            if (out := kwargs.get("out")) is not None and self.is_there(out) == (torch.device(wanted).type == "cpu"):
                self._note(name)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name not in _MIXING_IS_FINE:
            self._judge(name, args, tensors)
        result = func(*args, **kwargs)
        in_place = name.endswith("_") and not name.endswith("__")
        there = any(map(self.is_there, tensors[:1] if in_place else tensors))
        there = there if wanted is None else torch.device(wanted).type != "cpu"
        return self._mark(result) if there and name not in _NO_RESULT else result

    def _move(self, func: Any, args: Any, kwargs: Any) -> Any:
        """``to``, ``cpu`` and ``cuda``: a tensor that changes memories is a copy."""
        source, before = args[0], self.is_there(args[0])
        after = {torch.Tensor.cpu: False, torch.Tensor.cuda: True}.get(func, before)
        rest = []
        for argument in (*args[1:], *((kwargs.pop("device"),) if "device" in kwargs else ())):
            if isinstance(argument, (torch.device, str)):
                after, argument = torch.device(argument).type != "cpu", HOST
            elif isinstance(argument, Tensor):
                after = self.is_there(argument)
            rest.append(argument)
        result = torch.Tensor.to(source, *(rest or [HOST]), **kwargs)
        if after != before and result.untyped_storage()._cdata == source.untyped_storage()._cdata:
            result = result.clone()
        return self._mark(result) if after else result

    def _judge(self, name: str, args: Any, tensors: list[Tensor]) -> None:
        if torch._C._current_graph_task_id() != -1:  # autograd is running
            return
        there = [tensor for tensor in tensors if self.is_there(tensor)]
        here = [tensor for tensor in tensors if not self.is_there(tensor) and tensor.dim() > 0]
        is_index = name in ("__getitem__", "__setitem__") and self.is_there(args[0])  # torch moves an index itself
        if here and any(tensor.dim() > 0 for tensor in there) and not is_index:
            self._note(name)

    def _note(self, name: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if frame.filename != __file__][-3:]
        places = " < ".join(f"{frame.filename}:{frame.lineno}" for frame in reversed(frames))
        self.mixed[f"{name} at {places}"] += 1

    def _backward(self, outputs: Any, grad_tensors: Any = None, **_: Any) -> None:
        """As ``torch.autograd.backward`` does, but with this mode left on for what of it is Python."""
        output, gradient = tree_leaves(outputs)[0], (tree_leaves(grad_tensors) or [None])[0]
        gradient = torch.ones_like(output) if gradient is None else gradient
        with self:
            torch.autograd.Variable._execution_engine.run_backward(  # type: ignore[attr-defined]
                (output,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
