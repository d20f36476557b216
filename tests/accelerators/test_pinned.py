"""What pinning takes: our setting and the planner's formula against torch's own allocator, compiled from its header.

CUDA's and HIP's allocators are this one with their own ``allocate_host_memory``; theirs has not been run.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.cpp_extension import include_paths, library_paths

from mcore_rl.config.engine import Device, Precision
from mcore_rl.config.launch import load_cluster, load_recipe
from mcore_rl.config.reward_model import RewardModelConfig
from mcore_rl.config.rollout import RolloutConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.parallel.device import detect
from mcore_rl.parallel.pinned import keep_large_blocks_exact, knows_setting, side_by_side
from mcore_rl.parallel.pinned_size import KEY, MAX_CACHED_BYTES, block_bytes, with_setting
from mcore_rl.planning.peaks import Phase, Place
from mcore_rl.planning.plan import Plan, plan
from mcore_rl.planning.recipes import recipe_model
from mcore_rl.planning.states import ModelSizes, States
from mcore_rl.rollout.vllm.engine.environment import engine_environment
from tests.support.skips import not_installed

ROCM = replace(detect(Device.cpu), kind=Device.rocm, device_type="cuda", num_devices=8)
GIB, MIB = 2**30, 2**20
SOURCE = Path(__file__).parents[1] / "support" / "host_allocator.cpp"
Blocks = Callable[..., list[int]]


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Blocks:
    """(settings, sizes or "free"...) -> the blocks that torch asks the driver for, negative where given back.

    environ: the variables of its process, where settings is "inherited".
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip(not_installed("g++, which compiles torch's allocator from its header"))
    program = tmp_path_factory.mktemp("allocator") / "host_allocator"
    (libraries,) = library_paths()
    command = [compiler, "-std=c++20", *(f"-I{path}" for path in include_paths()), str(SOURCE), "-o", str(program),
               f"-L{libraries}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{libraries}"]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, text=True)

    def ask(settings: str, *words: int | str, environ: dict[str, str] | None = None) -> list[int]:
        command = [program, settings, *map(str, words)]
        run = subprocess.run(command, check=True, capture_output=True, text=True, env=environ)
        return [int(word) for word in run.stdout.split()]

    return ask


@pytest.mark.tier("ci")
def test_a_block_takes_what_the_formula_says(blocks: Blocks) -> None:
    sizes = [1, 64, 4097, 3 * MIB, MAX_CACHED_BYTES, MAX_CACHED_BYTES + 1, 3 * GIB + 5, int(8.5 * GIB), 36 * GIB]
    assert blocks(with_setting(""), *sizes) == [block_bytes(size) for size in sizes]
    assert blocks("", *sizes) == [1 << (size - 1).bit_length() for size in sizes]


@pytest.mark.tier("ci")
def test_a_large_block_is_given_back_and_a_small_one_is_kept(blocks: Blocks) -> None:
    large, small = int(8.5 * GIB), 3 * MIB
    assert blocks(with_setting(""), large, "free", 15 * GIB) == [large, -large, 15 * GIB]
    assert blocks(with_setting(""), small, "free", small + 1) == [4 * MIB]


@pytest.mark.tier("ci")
def test_why_it_is_not_the_setting_whose_name_says_it(blocks: Blocks) -> None:
    """torch 2.13 gives the freed 8.5 GiB to who asks for 15: no new block is made."""
    assert blocks("pinned_max_round_threshold_mb:1", int(8.5 * GIB), "free", 15 * GIB) == [int(8.5 * GIB)]


def test_other_settings_stay() -> None:
    assert with_setting("") == f"{KEY}:256"
    assert with_setting(f"expandable_segments:True,{KEY}:7,max_split_size_mb:512") == (
        f"expandable_segments:True,max_split_size_mb:512,{KEY}:256"
    )


def test_the_setting_is_added_to_those_of_the_process() -> None:
    before = torch._C._accelerator_getAllocatorSettings()
    try:
        torch._C._accelerator_setAllocatorSettings("max_split_size_mb:512")
        keep_large_blocks_exact()
        assert torch._C._accelerator_getAllocatorSettings() == f"max_split_size_mb:512,{KEY}:256"
    finally:
        torch._C._accelerator_setAllocatorSettings(before)


@pytest.fixture(params=["2.11", "another that does not know the key"])
def older_torch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    refusing = SimpleNamespace(
        _accelerator_getAllocatorSettings=lambda: "a:1", _accelerator_setAllocatorSettings=refuse
    )
    before = torch._C._accelerator_getAllocatorSettings()
    monkeypatch.setattr(torch, "_C", SimpleNamespace() if request.param == "2.11" else refusing)
    yield
    monkeypatch.undo()
    assert torch._C._accelerator_getAllocatorSettings() == before


def refuse(settings: str) -> None:
    if KEY in settings:
        raise ValueError(f"Unrecognized key '{KEY}'")
    assert settings == "a:1"


@pytest.mark.usefixtures("older_torch")
def test_an_older_torch_keeps_its_own_rule() -> None:
    keep_large_blocks_exact()


@pytest.mark.usefixtures("older_torch")
def test_an_engine_on_an_older_torch_keeps_what_it_inherits() -> None:
    """torch 2.11 raised ``Unrecognized key 'pinned_max_cached_size_mb'`` at an engine's first allocation."""
    for environ in ({}, {"PYTORCH_ALLOC_CONF": "b:2"}):
        changed = engine_environment(ROCM, RolloutConfig(), (0,), environ=environ)
        assert not [name for name in changed if "ALLOC_CONF" in name]


def test_asking_whether_torch_knows_the_setting_changes_none() -> None:
    before = torch._C._accelerator_getAllocatorSettings()
    assert knows_setting() and torch._C._accelerator_getAllocatorSettings() == before


def test_tensors_lie_side_by_side_in_one_block() -> None:
    like = [torch.empty(3, dtype=torch.bfloat16), torch.empty(5, 2, device="meta"), torch.empty(0), torch.empty(7).t()]
    made = side_by_side(like, pinned=False)
    assert [(t.shape, t.dtype, t.device.type) for t in made] == [(t.shape, t.dtype, "cpu") for t in like]
    assert len({tensor.untyped_storage().data_ptr() for tensor in made}) == 1
    for value, tensor in enumerate(made):
        tensor.fill_(value)
    assert all(bool((tensor == value).all()) for value, tensor in enumerate(made))
    assert made[0].untyped_storage().nbytes() == 64 + 64 + 0 + 64


def plan_of_72b() -> tuple[Plan, list[int]]:
    """The plan of 72B's recipe, and a rank's blocks at most: weights, their snapshot, optimizer, its copy."""
    run = load_recipe("qwen25_72b_grpo")
    assert isinstance(run, RunConfig)
    model, parallel = recipe_model(run), run.actor.parallel
    states = States(ModelSizes(model), parallel, run.trainer.world_size, Precision.bfloat16)
    weights, optimizer = (
        max(getattr(states.of_stage(stage), part) for stage in range(parallel.pp)) for part in ("weights", "optimizer")
    )
    return plan(run, model, load_cluster(run.recipe.cluster)), [weights] * 2 + [optimizer] * 2


@pytest.mark.tier("ci")
def test_a_node_of_72b_takes_what_the_plan_says_and_would_not_fit_without_the_setting(blocks: Blocks) -> None:
    made, sizes = plan_of_72b()
    (peak,) = (peak for peak in made.peaks if (peak.phase, peak.place) == (Phase.save, Place.host))
    assert peak.capacity is not None
    rows = {row.part: row.num_bytes for row in peak.rows}
    others = rows.pop("processes") + rows.pop("engine weights, asleep")
    assert sum(rows.values()) == 8 * sum(blocks(with_setting(""), *sizes))
    assert others + sum(rows.values()) == peak.num_bytes < peak.capacity < others + 8 * sum(blocks("", *sizes))


SEGMENTS = [20 * MIB, 40 * MIB, 116 * MIB, 232 * MIB, 594 * MIB]  # of 72B over 4 ranks: multiples of 2 MiB above 10


@pytest.mark.tier("ci")
@pytest.mark.parametrize(
    ("inherited", "stays"),
    [
        ({}, ""),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"}, "max_split_size_mb:512,"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, "max_split_size_mb:512,"),
        ({"PYTORCH_HIP_ALLOC_CONF": "max_split_size_mb:512"}, "max_split_size_mb:512,"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512", "PYTORCH_ALLOC_CONF": "expandable_segments:True"},
         "max_split_size_mb:512,"),
    ],
)  # fmt: skip
def test_what_a_sleeping_engine_keeps_is_not_rounded(blocks: Blocks, inherited: dict[str, str], stays: str) -> None:
    """By torch's own choice among the variables of the engine's process, and by vLLM's own."""
    changed = engine_environment(ROCM, RolloutConfig(), (0,), environ=inherited)
    environ = inherited | {name: value for name, value in changed.items() if value is not None}
    assert blocks("inherited", *SEGMENTS, environ=environ) == SEGMENTS
    assert {environ[name] for name in alloc_conf_variables()} == {f"{stays}{KEY}:1"}


def alloc_conf_variables() -> list[str]:
    """``ALLOC_CONF_ENV_VARS`` of the installed vLLM, which imports a device's kernels beside it."""
    spec = find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    source = (Path(spec.submodule_search_locations[0]) / "device_allocator" / "alloc_conf.py").read_text()
    (value,) = [
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ALLOC_CONF_ENV_VARS"
    ]
    return list(ast.literal_eval(value))


def test_a_reward_model_keeps_what_it_has_pinned() -> None:
    """It sleeps with its weights in every step."""
    changed = engine_environment(ROCM, RewardModelConfig(), (0,), environ={})
    assert not [name for name in changed if "ALLOC_CONF" in name]
