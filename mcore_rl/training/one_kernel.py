"""Small functions of tensors that are one kernel on an accelerator, by ``torch.compile``.

On the CPU they run as they are written, operation by operation, and so they do where torch cannot compile them (no
Triton, no C compiler, switched off): that is tried once, and said once.

What is compiled rounds wherever PyTorch's operations would (``emulate_precision_casts``, torch/_inductor/config.py,
which also keeps Triton from making one rounding of a product and a sum): a rotation has the same bits, a norm too but
for the order of its sums.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mcore_rl.parallel.device_details import is_accelerators

logger = logging.getLogger(__name__)

_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"emulate_precision_casts": True}
_TOLD = 1_000  # characters of a failure; some have all the code that was to be compiled
_failures: list[str] = []


def compiles(tensor: Tensor) -> bool:
    """Whether functions of ``tensor`` are compiled: it is on an accelerator, and nothing has failed to compile yet."""
    return not _failures and is_accelerators(tensor)


class OneKernel:
    """Decorates a function of tensors, of which the first decides whether it is compiled.

    The function must change none of them.  Any number of rows (the first dimension) is one kernel; every width (the
    last) is another.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    @cached_property
    def compiled(self) -> Callable[..., Any]:
        """What torch makes of it at the first call; importing its compiler takes a second."""
        fast: Callable[..., Any] = torch.compile(self.function, options=_OPTIONS)
        if fast is self.function:
            raise RuntimeError("it is switched off (TORCHDYNAMO_DISABLE)")
        return fast

    def __call__(self, *arguments: Any) -> Any:
        """The function's arguments and result."""
        if not compiles(arguments[0]):
            return self.function(*arguments)
        try:
            return self.compiled(*map(_with_any_number_of_rows, arguments))
        except torch.OutOfMemoryError:
            raise
        except Exception as problem:  # noqa: BLE001  # of whatever kind: the same is computed without a compiler
            _failures.append(f"{type(problem).__name__}: {problem}"[:_TOLD])
            logger.warning(
                "torch.compile failed: norms and rotations run operation by operation, with the same numbers and more "
                "slowly. %s",
                _failures[0],
            )
            return self.function(*arguments)


def _with_any_number_of_rows(argument: Any) -> Any:
    """The argument; of a tensor of rows, marked for the compiler: by itself it would make every size its own kernel."""
    if isinstance(argument, Tensor) and argument.dim() > 1:
        torch._dynamo.maybe_mark_dynamic(argument, 0)
        torch._dynamo.mark_static(argument, argument.dim() - 1)
    return argument
