"""An engine that goes on from its files is the one that wrote them, with the optimizer that the device has."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from mcore_rl.config.engine import Device, LayerSpec, Recompute
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.families.registry import FAMILIES
from mcore_rl.parallel.device import Platform, detect
from mcore_rl.parallel.groups import destroy_groups
from mcore_rl.parallel.launch import Rank, run_ranks
from mcore_rl.weights.table import Table
from tests.support.engines import same_bits, state_of, weights_of
from tests.support.train_steps import SIZES, batch_of, build, negative_log_likelihood


def whole_and_resumed(rank: Rank, kind: Device, directory: Path) -> tuple[bool, list[float], list[float]]:
    """Whether the state was loaded bit for bit, and the losses of two steps after that: of both engines."""
    from mcore_rl.training.run_state import load_run_state  # needs xxhash
    from tests.support.saved_states import save

    platform, size = detect(kind), SIZES[False]["dense"]
    rank.init_process_group(platform)
    table = Table(FAMILIES["llama"], size.model, ParallelConfig(), 1)
    losses: list[list[float]] = []
    bits: list[list[Tensor]] = []
    batch, counts = batch_of(size)
    for is_resumed in (False, True):
        engine = build(size, platform, LayerSpec.local, Recompute.none)
        for _ in range(1 if is_resumed else 2):
            engine.train_step(batch, negative_log_likelihood, counts)
        if is_resumed:
            assert load_run_state(engine, table, directory)
        else:
            assert save(engine, table, directory).problem is None
        bits.append([*weights_of(engine).values(), *state_of(engine)])
        losses.append([engine.train_step(batch, negative_log_likelihood, counts).loss for _ in range(2)])
        destroy_groups()
    return same_bits(*bits), losses[0], losses[1]


def test_an_engine_goes_on_from_its_files(platform: Platform, processes: None, tmp_path: Path) -> None:
    same, whole, resumed = run_ranks(whole_and_resumed, 1, (platform.kind, tmp_path), timeout_s=300)[0]
    assert same
    # Attention's kernel for packed sequences sums the gradients of queries in any order on an accelerator.
    assert resumed == (pytest.approx(whole, rel=2e-3) if platform.is_accelerator else whole)
