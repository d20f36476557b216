"""The places where the host may wait for the device in a pass, each with its reason; any other is a defect.

A read makes the host wait until the device has done everything before it, and the device then waits for the host's
next work.  Once a pass that is a few microseconds; once a layer it is felt.
"""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.rehearsal.ledger import Ledger, Read


@dataclass(frozen=True)
class Allowed:
    """A function that may read the device.  per_step: at most once a pass; False: for each microbatch, too."""

    path: str
    function: str
    reason: str
    per_step: bool = True


ALLOWED = (
    Allowed(
        "megatron/core/optimizer/__init__.py",
        "_get_param_groups",
        "ranks agree on the optimizer's groups, when it is built",
    ),
    Allowed("mcore_rl/training/microbatch.py", "_plan", "ranks agree on the number of microbatches"),
    Allowed("mcore_rl/training/step_outputs.py", "over_ranks", "scores, loss and metrics go to the controller"),
    Allowed("mcore_rl/training/routing.py", "metrics", "the routers' statistics go to the controller"),
    Allowed("mcore_rl/training/optimizer.py", "_grad_norm", "a gradient that is not finite must not move the weights"),
    Allowed(
        "megatron/core/transformer/moe/token_dispatcher.py",
        "dispatch_preprocess",
        "an all-to-all must know on the host how many rows go where",
        per_step=False,
    ),
    Allowed(
        "megatron/core/transformer/moe/moe_utils.py",
        "permute",
        "masked_select of 0.16.1's local layers where tokens leave their rank; Transformer Engine's has none",
        per_step=False,
    ),
    Allowed(
        "mcore_rl/training/grouped_product.py",
        "counts",
        "where no kernel takes all experts at once the host launches one after another, once read a layer",
        per_step=False,
    ),
)


def reason_of(read: Read) -> str | None:
    """Why ``read`` is allowed; None if it is not."""
    return next(
        (
            each.reason
            for each in ALLOWED
            if (each.path, each.function) == (read.path, read.function) and (read.per_step or not each.per_step)
        ),
        None,
    )


def refused(ledger: Ledger) -> list[str]:
    """A line for each read that is not allowed: phase, place, operation."""
    return [
        f"{read.phase}: {read.path}:{read.line}, {read.function}: {read.operation}"
        for read in ledger.reads
        if reason_of(read) is None
    ]
