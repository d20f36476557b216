"""Adapters in the engine: first values, what is frozen, snapshots, checkpoints, merged exports, grouped experts.

That every layout computes and trains the same is in tests/invariance, and that it is what PEFT does in tests/parity.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore_rl.checkpoints.export import export_stream
from mcore_rl.checkpoints.state_writer import StateWriter
from mcore_rl.config.engine import Precision
from mcore_rl.config.lora import AdapterInit, LoraConfig
from mcore_rl.config.parallel import parse_layout
from mcore_rl.parallel.launch import Rank
from mcore_rl.training.adapters import _add, _add_grouped, add_of_groups
from mcore_rl.training.engine import Engine
from mcore_rl.training.grouped_product import Groups
from mcore_rl.training.run_state import begin_save, load_run_state
from mcore_rl.weights.adapter_table import AdapterTable
from tests.support import adapters, batches, engines, models
from tests.support.forked import run_ranks
from tests.support.full_weights import Weights

MODEL = models.moe(num_layers=2)
LAYOUTS = ("", "tp=2,etp=1", "tp=2,etp=2", "ep=2", "pp=2")
LORA = LoraConfig(rank=3, alpha=6.0)


@dataclass
class Observed:
    """What two ranks saw; by layout where that is said."""

    first: dict[str, Weights] = field(default_factory=dict)
    trained: Weights = field(default_factory=dict)
    resumed: dict[str, bool] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    base: Weights = field(default_factory=dict)
    merged: Weights = field(default_factory=dict)


def _build(groups: Any, layout: str, table: AdapterTable, precision: Precision = Precision.float32) -> Engine:
    return engines.build(groups, MODEL, engines.config(precision=precision), layout=layout, adapters=table)


def _step(engine: Engine, groups: Any) -> None:
    batch = batches.ragged(101)
    mine = engines.share_of(batch, groups)
    step = engine.train_step(mine, batches.policy_loss, batches.denominators(batch), with_entropy=True)
    assert step.skipped is None and step.grad_norm > 0


def _save(engine: Engine, table: AdapterTable, folder: Path) -> None:
    writer = StateWriter(engine.platform)
    if engine.groups.rank == 0:
        folder.mkdir()
    dist.barrier()
    begin_save(engine, table, folder, writer, behind=False)
    outcome = writer.outcome()
    assert outcome is not None and outcome.problem is None
    dist.barrier()


def _observe(rank: Rank, folder: Path) -> Observed:
    seen = Observed()
    with engines.world(rank):
        for layout in LAYOUTS:
            table = partial(adapters.adapter_table, MODEL, parallel=parse_layout(layout), world_size=2)
            with engines.groups_of(layout) as groups:
                engine = _build(groups, layout, table(LORA))
                seen.first[layout] = adapters.gather(engine, table(LORA))
                if layout == "tp=2,etp=2":
                    seen.base = _exported(engine, table(LORA), rank.rank)  # B is 0
                    _look(engine, groups, table(LORA), seen)
                    _step(engine, groups)
                    seen.trained = adapters.gather(engine, table(LORA))
                    _save(engine, table(LORA), folder / "state")
                    seen.merged = _exported(engine, table(LORA), rank.rank)
        for layout in ("tp=2,etp=2", "ep=2"):
            table = partial(adapters.adapter_table, MODEL, parallel=parse_layout(layout), world_size=2)
            with engines.groups_of(layout) as groups:
                engine = _build(groups, layout, table(replace(LORA, init=AdapterInit.gaussian)))
                seen.first[f"{layout} gaussian"] = adapters.gather(engine, table(LORA))
                seen.resumed[layout] = load_run_state(engine, table(LORA), folder / "state")
                assert engines.same_bits(adapters.gather(engine, table(LORA)), seen.trained), layout
                _step(engine, groups)
    return seen


def _look(engine: Engine, groups: Any, table: AdapterTable, seen: Observed) -> None:
    """What is frozen, the snapshot, and the memory of the optimizer."""
    engine.snapshots.take("reference")
    engine.snapshots.take("base", base=True)
    mine = [parameter for chunk in engine.models for parameter in chunk.parameters() if parameter.requires_grad]
    batch = engines.share_of(batches.ragged(101), groups)
    before = engine.score(batch).logprobs_T
    frozen = {
        name: tensor.clone()
        for name, tensor in engine.models[0].named_parameters()
        if not tensor.requires_grad
    }  # fmt: skip
    _step(engine, groups)
    moved = engine.score(batch).logprobs_T
    assert before is not None and moved is not None and not torch.equal(before, moved)
    for name in ("reference", "base"):
        assert torch.equal(before, engine.score(batch, snapshot=name).logprobs_T), "the base, without a copy of it"
    assert torch.equal(moved, engine.score(batch).logprobs_T), "and adapters are on again"
    after = dict(engine.models[0].named_parameters())
    assert frozen and all(torch.equal(tensor, after[name]) for name, tensor in frozen.items())
    assert all(after[name].grad is None and not hasattr(after[name], "main_grad") for name in frozen)
    assert engine.optimizer is not None
    seen.facts["adapter bytes"] = sum(tensor.nbytes for tensor in mine)
    both = engine.snapshots.num_bytes()
    engine.snapshots.drop("base")
    seen.facts["snapshot bytes"] = engine.snapshots.num_bytes()
    seen.facts["base bytes"] = both - seen.facts["snapshot bytes"]
    seen.facts["state bytes"] = sum(tensor.nbytes for tensor in engine.optimizer.state_tensors())
    seen.facts["gradient bytes"] = sum(
        buffer.grad_data.nbytes
        for chunk in engine.chunks
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)  # type: ignore[union-attr, misc]
    )


def _exported(engine: Engine, table: AdapterTable, rank: int) -> Weights:
    return {name: tensor for part in export_stream(engine.models, table.base, rank) for name, tensor in part}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, processes: None) -> Observed:
    return run_ranks(_observe, 2, (tmp_path_factory.mktemp("adapters"),), timeout_s=240)[0]


def test_first_values_depend_on_no_layout(seen: Observed) -> None:
    for layout in LAYOUTS[1:]:
        assert engines.same_bits(seen.first[layout], seen.first[""]), layout
    first, gaussian = seen.first[""], seen.first["ep=2 gaussian"]
    starts = {name: tensor for name, tensor in first.items() if ".lora_A." in name}
    assert len({tensor.sum().item() for tensor in starts.values()}) == len(starts), "each has numbers of its own"
    assert all(not tensor.any() for name, tensor in first.items() if ".lora_B." in name)
    for name, tensor in starts.items():
        bound = tensor.shape[1] ** -0.5
        assert 0.9 * bound < tensor.abs().max() <= bound, name
    drawn = torch.cat([tensor.flatten() for name, tensor in gaussian.items() if ".lora_A." in name])
    assert float(drawn.std()) == pytest.approx(1 / LORA.rank, rel=0.05) and abs(float(drawn.mean())) < 0.02


def test_only_adapters_take_memory_beside_the_base(seen: Observed) -> None:
    ours = seen.facts["adapter bytes"]
    assert ours <= seen.facts["snapshot bytes"] < 1.1 * ours + 4096, "rounded up, and the routers' buffers"
    assert seen.facts["base bytes"] < 4096, "of the base the routers' buffers alone"
    assert ours <= seen.facts["gradient bytes"] < 1.2 * ours + 4096
    assert seen.facts["state bytes"] <= 3 * ours


def test_a_checkpoint_of_adapters_is_read_in_any_layout(seen: Observed) -> None:
    assert seen.resumed == {"tp=2,etp=2": True, "ep=2": False}


def test_exports_are_merged(seen: Observed) -> None:
    """W + 2 B A for every adapted weight, against float64 by hand; all others as they are."""
    merged, trained = seen.merged, seen.trained
    with_adapters, largest = 0, 0.0
    for name, tensor in merged.items():
        stem = f"{adapters.PEFT}{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" not in trained:
            assert torch.equal(tensor, seen.base[name]), name
            continue
        with_adapters += 1
        a, b = (trained[f"{stem}.lora_{which}.weight"].double() for which in "AB")
        change = LORA.alpha / LORA.rank * (b @ a)
        whole = tensor.double() - change
        torch.testing.assert_close(whole.float(), seen.base[name], rtol=1e-6, atol=2e-7)
        largest = max(largest, float(change.abs().max()))
    assert largest > 1e-3, "there was something to add"
    assert with_adapters == len(trained) // 2


class Grouped(torch.nn.Module):
    """As Transformer Engine's linear of all experts of a rank: numbered weights, rows of one expert after another."""

    def __init__(self, num: int) -> None:
        super().__init__()
        for expert in range(num):
            self.register_parameter(f"weight{expert}", torch.nn.Parameter(torch.randn(4, 6)))

    def forward(self, x: torch.Tensor, m_splits: list[int]) -> tuple[torch.Tensor, None]:
        parts = [part @ getattr(self, f"weight{n}").T for n, part in enumerate(x.split(m_splits))]
        return torch.cat(parts), None


class Low(torch.nn.Module):
    """An adapter that adds ``factor`` times the first four inputs."""

    is_off, scale = False, 2.0

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        return output + self.factor * x[:, :4]

    def _a(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.eye(4, 6, dtype=dtype)

    def _b(self, dtype: torch.dtype) -> torch.Tensor:
        return self.factor / self.scale * torch.eye(4, dtype=dtype)


def test_experts_of_one_grouped_linear_each_add_their_own() -> None:
    linear, x, counts = Grouped(3), torch.randn(7, 6), [2, 0, 5]
    plain, _ = linear(x, counts)
    linear.lora = torch.nn.ModuleList([Low(1.0), Low(10.0), Low(100.0)])
    linear.register_forward_hook(_add_grouped)
    factors = torch.tensor([1.0] * 2 + [100.0] * 5)[:, None]
    torch.testing.assert_close(linear(x, counts)[0], plain + factors * x[:, :4])


class Unread(Groups):
    """Numbers of rows that are on the device alone."""

    @property
    def counts(self) -> list[int]:  # type: ignore[override]
        raise AssertionError("the host waits for the device")


class Drawn(torch.nn.Module):
    """An expert's adapter of rank 8."""

    is_off = False
    scale = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.randn(8, 16))
        self.b = torch.nn.Parameter(torch.randn(24, 8))

    def _a(self, dtype: torch.dtype) -> torch.Tensor:
        return self.a.to(dtype)

    def _b(self, dtype: torch.dtype) -> torch.Tensor:
        return self.b.to(dtype)


def test_adapters_of_all_experts_are_added_and_the_host_learns_no_count() -> None:
    counts, experts = [3, 0, 5], [Drawn() for _ in range(3)]
    rows, output = torch.randn(8, 16), torch.randn(8, 24)
    parameters = [tensor for expert in experts for tensor in (expert.a, expert.b)]
    parts = zip(rows.split(counts), output.split(counts), experts, strict=True)
    expected = torch.cat([plain + 2 * (part @ expert.a.T @ expert.b.T) for part, plain, expert in parts])
    out = add_of_groups(experts, Unread(torch.tensor(counts), rows.device), rows, output)  # type: ignore[arg-type]
    torch.testing.assert_close(out, expected)
    gradients = [torch.autograd.grad(each.square().sum(), parameters) for each in (out, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("with_bias", [False, True])
def test_adapters_behind_a_fused_norm_get_the_normed_input(with_bias: bool) -> None:
    """Transformer Engine's norm and linear return what the norm gave, in one of two forms."""
    x, normed = torch.randn(5, 6), torch.randn(5, 6)
    output, bias = torch.randn(5, 4), torch.randn(4)
    linear = torch.nn.Module()
    linear.lora = Low(1.0)
    results = (output, bias, normed) if with_bias else ((output, normed), None)
    changed = _add(linear, (x,), results)  # type: ignore[arg-type]
    assert len(changed) == 2 and changed[1] is (bias if with_bias else None)
    torch.testing.assert_close(changed[0], output + normed[:, :4])
