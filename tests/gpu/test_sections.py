"""The sections of benchmarks/gpu.py as on an accelerator, without one: in a pretended second memory, with tiny sizes.

What a section does only where there is an accelerator runs here: nothing may meet on the device that was left on the
host, and every fact must be there.  Figures of the allocator are made up; kernels that the CPU lacks have stand-ins.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.config.engine import Device
from mcore_rl.parallel import cpu
from mcore_rl.parallel.copies import HostCopies
from mcore_rl.parallel.device import Memory, detect
from mcore_rl.parallel.launch import Rank, run_ranks
from tests.gpu.test_placement import LEFT_OUT
from tests.gpu.two_memories import THERE, TwoMemories
from tests.support.skips import ACCELERATOR
from tests.training.test_attention_kernels import varlen_without_groups

# (section, whether tiny: the parity of all models is that of an accelerator)
SECTIONS = {
    "machine:facts": True, "attention:facts": True, "token_logprobs:facts": True, "copies:facts": True,
    "steps:dense": True, "steps:moe": True, "moves:facts": True, "parity:float32": False, "parity:bfloat16": False,
}  # fmt: skip
MODULES = (
    "benchmarks.logprobs", "benchmarks.offload", "benchmarks.gpu_sections.section", "mcore_rl.training.offload",
    "mcore_rl.training.snapshots", "tests.support.train_steps",
)  # fmt: skip


def steadily_more() -> Callable[[object], Memory]:
    """An allocator of which a little more is in use whenever it is asked."""
    asked = iter(range(1, 10**9))

    def memory(platform: object) -> Memory:
        return Memory(
            allocated_bytes=1_000 * next(asked), reserved_bytes=4 * 2**20, peak_bytes=2 * 2**20, free_bytes=2**40,
            total_bytes=2**41,
        )  # fmt: skip

    return memory


def pretend() -> None:
    """Make this process one whose torch has an accelerator, as far as Python can see."""
    from mcore_rl.training import attention_kernels, block_attention
    from tests.support import train_steps

    for patch in cpu.PATCHES:
        if patch.name not in LEFT_OUT:
            patch.apply()
    generator: Any = torch.Generator
    torch.Generator = lambda device=None: generator()  # type: ignore[misc, assignment]
    torch.cuda.current_device = lambda: THERE  # type: ignore[assignment, return-value]
    torch.cuda.set_device = lambda device: None  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda device=None: (9, 0)  # type: ignore[assignment]  # an H100's, which multiplies groups in one kernel
    attention_kernels.varlen_attn = varlen_without_groups  # type: ignore[assignment]
    block_attention._product = lambda a, b: torch.bmm(a.float(), b.float())  # in the place of one into float32
    train_steps.SIZES[True] = train_steps.SIZES[False]
    answers: dict[str, Callable[..., Any]] = {
        "memory": steadily_more(), "synchronize": lambda platform: None, "reset_peak_memory": lambda platform: None,
        "empty_cache": lambda platform: None, "copies_of": lambda platform: HostCopies(),
        "pinned_bytes": lambda platform: 0,
        "device_uuids": lambda platform: ("a-uuid",), "set_device": lambda platform, rank: THERE,
    }  # fmt: skip
    sections = [f"benchmarks.gpu_sections.{name.partition(':')[0]}" for name in SECTIONS]
    for module in map(importlib.import_module, (*MODULES, *sections)):
        for name, answer in answers.items():
            if name in vars(module):
                setattr(module, name, answer)


def look(rank: Rank, name: str, tiny: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """(the facts of a section, what a real accelerator would have refused)"""
    platform = replace(detect(Device.cpu), kind=Device.cuda, device_type=THERE.type)
    pretend()
    from benchmarks.gpu_sections.section import Bench

    module, _, function = name.partition(":")
    section = vars(importlib.import_module(f"benchmarks.gpu_sections.{module}"))[function]
    memories = TwoMemories()
    with memories:
        facts = [asdict(fact) for fact in section(Bench(rank, platform, THERE, tiny, time.monotonic() + 60, Path()))]
    return facts, list(memories.mixed)


@pytest.mark.skipif(detect(Device.auto).is_accelerator, reason=f"{ACCELERATOR}there is a real one")
@pytest.mark.tier("full")
@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_runs_where_an_accelerator_is(name: str, processes: None) -> None:
    facts, mixed = run_ranks(look, 1, (name, SECTIONS[name]), threads_per_rank=1, timeout_s=250)[0]
    assert not mixed, "\n".join(mixed)
    assert len(facts) > 3 and [fact for fact in facts if not fact["ok"]] == []
    what = "\n".join(f"{fact['what']} {fact['beside']}" for fact in facts)
    expected = {
        "attention:facts": ("varlen: tiny", "varlen: error", "capped scores"),
        "machine:facts": ("taken before any tensor", "product of", "data sheet"),
        "copies:facts": ("available memory fell",),
        "steps:dense": ("memory, state planner", "memory, peak planner", "reserved and not in use"),
        "moves:facts": ("memory that offload frees", "swap in", "hidden behind a step"),
        "parity:float32": ("deepseek_v3", "gemma2", "qwen2_moe"),
    }
    assert all(words in what for words in expected.get(name, ())), what
