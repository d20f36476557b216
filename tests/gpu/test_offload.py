"""State that moves on a stream of its own beside real work of the device; on the CPU, one after another."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.gpu_sections.moves import TINY
from benchmarks.offload import MODEL, trained_engine
from mcore_rl.config.engine import Device
from mcore_rl.parallel.copies import copies_of
from mcore_rl.parallel.device import Platform, detect, device_of, memory, pinned_empty_like
from mcore_rl.parallel.groups import destroy_groups
from mcore_rl.parallel.launch import Rank, run_ranks
from mcore_rl.training.engine import Engine
from mcore_rl.training.offload import OffloadPart

OPTIMIZER = (OffloadPart.optimizer,)


def keep_busy(engine: Engine, size: int) -> None:
    """Queues products on the device, which take far longer than a copy of the state."""
    matrix = torch.ones(size, size, device=engine.groups.device, dtype=torch.bfloat16)
    for _ in range(40):
        matrix = (matrix @ matrix).clamp(-1, 1)


def bits(engine: Engine) -> list[Tensor]:
    assert engine.optimizer is not None
    return [tensor.detach().to("cpu", copy=True) for tensor in engine.optimizer.state_tensors()]


def add_one(engine: Engine) -> None:
    assert engine.optimizer is not None
    with torch.no_grad():
        torch._foreach_add_(engine.optimizer.state_tensors(), 1.0)


def journey(rank: Rank, kind: Device) -> tuple[dict[str, bool], dict[str, int]]:
    """(whether state was what it had to be, bytes in use)"""
    platform = detect(kind)
    engine = trained_engine(rank, platform, MODEL if platform.is_accelerator else TINY)
    size, same, used = 8192 if platform.is_accelerator else 64, {}, {}
    before = bits(engine)
    engine.memory.offload()
    engine.memory.onload(behind=OPTIMIZER)
    keep_busy(engine, size)
    engine.memory.require(OffloadPart.optimizer)
    same["what arrives is used when it is there"] = all(map(torch.equal, bits(engine), before))

    keep_busy(engine, size)
    add_one(engine)  # not before that
    used["all"] = memory(platform).allocated_bytes
    engine.memory.offload(behind=OPTIMIZER)
    used["leaving"] = memory(platform).allocated_bytes
    engine.memory.offload([OffloadPart.weights])
    used["away"] = memory(platform).allocated_bytes
    keep_busy(engine, size)  # which would write where the state was, had it left too early
    engine.memory.onload()
    same["what leaves is what was computed"] = all(
        torch.equal(now, then + 1) for now, then in zip(bits(engine), before, strict=True)
    )
    destroy_groups()
    return same, used


def test_copies_beside_work_wait_for_what_they_need(platform: Platform, processes: None) -> None:
    same, used = run_ranks(journey, 1, (platform.kind,), timeout_s=300)[0]
    assert all(same.values()), same
    if platform.is_accelerator:
        assert used["all"] > used["leaving"] > used["away"]
        assert used["away"] < 0.1 * used["all"]


def test_a_copy_returns_before_it_is_done(platform: Platform) -> None:
    size = 1 << 30 if platform.is_accelerator else 1 << 10
    source = torch.ones(size, dtype=torch.uint8, device=device_of(platform, 0))
    target = pinned_empty_like(platform, source)
    copied = copies_of(platform).start([(target, source)])
    assert copied.done() is not platform.is_accelerator, "a gigabyte takes at least 15 ms"
    copied.wait()
    assert copied.done() and bool((target == 1).all())
