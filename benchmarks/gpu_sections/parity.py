"""The engine on the device against transformers on the CPU, model by model: one that fails leaves the others alone."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from benchmarks.gpu_sections.section import Bench, Fact, Facts, Skipped, guarded

if TYPE_CHECKING:
    from mcore_rl.parallel.groups import ProcessGroups
    from tests.support.engine_parity import Setting


def float32(bench: Bench) -> Facts:
    """In float32, where only the order of sums differs."""
    return agreement(bench, "FLOAT32")


def bfloat16(bench: Bench) -> Facts:
    """In bfloat16, from weights that it holds exactly and with experts that float32 chooses."""
    return agreement(bench, "BFLOAT16")


def agreement(bench: Bench, name_of_setting: str) -> Facts:
    """Each model's log-probs, loss and gradients; the bounds beside them are those of tests/gpu."""
    if find_spec("transformers") is None:
        raise Skipped("transformers is not installed, and nothing else computes the same models independently")
    from tests.support import engine_parity

    setting: Setting = {"FLOAT32": engine_parity.FLOAT32, "BFLOAT16": engine_parity.BFLOAT16}[name_of_setting]
    groups = engine_parity.joined(bench.rank, bench.platform)
    names = ("dense", "moe") if bench.tiny else engine_parity.models_for(bench.platform.is_accelerator, setting)
    for name in names:
        yield from guarded(name, of_model(bench, setting, name, groups))


def of_model(bench: Bench, setting: Setting, name: str, groups: ProcessGroups) -> Facts:
    """One model on both sides."""
    from tests.support import engine_parity

    ours = engine_parity.engine_found(bench.platform, setting, name, groups)
    theirs = engine_parity.reference_found(name, setting.precision)
    worst = (ours.logprobs_T - theirs.logprobs_T).abs().max().item()
    loss = abs(ours.loss / theirs.loss - 1)
    gradient = max(engine_parity.gradient_errors(ours, theirs).values())
    within = worst < setting.worst and loss < setting.loss and gradient < setting.gradient
    yield Fact(
        what=f"{name}: largest error of a log-prob",
        value=worst,
        unit="nats",
        beside=f"loss {loss:.1e}, gradients {gradient:.1e} relative; bounds {setting.worst:g}, {setting.loss:g}, "
        f"{setting.gradient:g}: {'within' if within else 'EXCEEDED'}",
        ok=within,
    )
