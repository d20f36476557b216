"""Each patch of ``parallel/cpu.py`` fits the Megatron that is installed, is needed there, and reaches all it should."""

from __future__ import annotations

from dataclasses import replace
from types import CodeType

import pytest
import torch

from mcore_rl.config.engine import Device
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.ground.errors import DeviceError
from mcore_rl.parallel import cpu, groups, launch
from mcore_rl.parallel.cpu import PATCHES, Line, Patch, make_megatron_run_on_cpu
from mcore_rl.parallel.device import Platform, detect
from mcore_rl.parallel.launch import Rank, run_ranks
from mcore_rl.parallel.layout import Layout
from tests.support import cpu_probes
from tests.support.cpu_probes import PROBES, Report
from tests.support.megatron_source import source_of
from tests.support.skips import ACCELERATOR

LINES = [line for patch in PATCHES for line in patch.answers]
NAMES = [patch.name for patch in PATCHES]

# Where torch finds a GPU, or was built for one, Megatron gets what it asks for and needs no answer.
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason=f"{ACCELERATOR}this torch is built for one")


def misplaced(line: Line) -> str | None:
    """None where ``line`` stands in its function in the installed Megatron; else where it is now."""
    text = source_of(line.path)
    if text is None:
        return f"{line.path} is gone"
    extents = extents_of(compile(text, line.path, "exec"))
    numbers = [number for number, other in enumerate(text.splitlines(), 1) if line.code in other]
    first, last = extents.get(line.within, (0, 0))
    if any(first <= number <= last for number in numbers):
        return None
    where = f"it is on line {', '.join(map(str, numbers))}" if numbers else "it is nowhere in the file"
    return f"{line.path}: {line.code!r} is not in {line.within}: {where}"


def extents_of(code: CodeType) -> dict[str, tuple[int, int]]:
    """Qualified name -> first and last line of each function below ``code``."""
    extents: dict[str, tuple[int, int]] = {}
    for below in code.co_consts:
        if isinstance(below, CodeType):
            numbers = [number for _, _, number in below.co_lines() if number is not None]
            extents |= {below.co_qualname: (min(numbers), max(numbers))} | extents_of(below)
    return extents


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.path}:{line.within}")
def test_every_line_stands_where_it_is_said_to(line: Line) -> None:
    assert misplaced(line) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"within": "disable_jit_fuser"}, "is not in disable_jit_fuser: it is on line 21"),
        ({"within": "deleted"}, "is not in deleted: it is on line 21"),
        ({"code": "jit_fuser = torch.deleted"}, "it is nowhere in the file"),
        ({"path": "no_such_file.py"}, "no_such_file.py is gone"),
    ],
)
def test_a_moved_line_is_found(change: dict[str, str], says: str) -> None:
    line = Line("jit.py", "enable_jit_fuser", "jit_fuser = torch.compile")
    assert misplaced(line) is None
    assert says in str(misplaced(replace(line, **change)))


def test_every_patch_is_applied() -> None:
    assert list(PATCHES) == [patch for patch in vars(cpu).values() if isinstance(patch, Patch)]


def test_every_line_has_a_probe() -> None:
    probed = {(probe.patch, probe.line) for probe in PROBES}
    assert probed == {(patch.name, line) for patch in PATCHES for line in patch.answers}


@pytest.fixture(scope="module")
def report(processes: None) -> Report:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "UNCOMPILED", {})
        (report,) = run_ranks(cpu_probes.run_all, 1, threads_per_rank=1, timeout_s=600)
    assert isinstance(report, Report)
    return report


def test_all_that_needs_a_patch_runs_with_all_of_them(report: Report) -> None:
    for rank, failures in enumerate(report.failures[None]):
        errors = {PROBES[index].run.__name__: failure.error for index, failure in failures.items()}
        assert errors == {}, f"rank {rank}"


@without_gpu
@pytest.mark.parametrize("patch", PATCHES, ids=NAMES)
def test_every_line_goes_wrong_without_its_patch(patch: Patch, report: Report) -> None:
    for failures in report.failures[patch.name]:
        for index, probe in enumerate(PROBES):
            if probe.patch != patch.name:
                continue
            name = f"{probe.run.__name__} without {patch.name!r}"
            assert index in failures, f"{name} runs well: {probe.line} needs no answer any more"
            failure = failures[index]
            fits = failure.by_its_own_word or failure.came_through(probe.line)
            assert fits, f"{name} did not fail at {probe.line} but with {failure.error}"


def _devices_within_contexts(_: Rank) -> list[str]:
    next(patch for patch in PATCHES if patch.name == "factories").apply()
    with torch.device("meta"):
        return [torch.tensor([]).device.type, torch.zeros(1).device.type, torch.zeros(1, device="cpu").device.type]


@pytest.mark.tier("test")
def test_patched_factories_obey_device_contexts(processes: None) -> None:
    """transformers' from_pretrained asks ``torch.tensor([])`` where it is."""
    assert run_ranks(_devices_within_contexts, 1, timeout_s=60) == [["meta", "meta", "cpu"]]


def test_every_user_of_a_replaced_function_gets_the_new_one(report: Report) -> None:
    assert report.held == [
        # Megatron's own FSDP, which this package does not offer.
        "megatron.core.distributed.fsdp.src.megatron_fsdp.utils._lazy_call is still the original "
        "megatron.core.tensor_parallel.random._lazy_call"
    ]


def test_the_comparison_sees_functions_of_torch_of_megatron_and_of_classes(report: Report) -> None:
    seen = {
        "torch.zeros",
        "torch.cuda.random.get_rng_state",
        "torch.Tensor.cuda",
        "megatron.core.parallel_state.create_group",
        "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.__init__",
    }
    assert seen <= set(report.replaced)


def test_patches_are_applied_once(report: Report) -> None:
    assert report.replaced_again == []


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As in a process that nobody has patched, but patching only says so."""
    said: list[str] = []
    patches = [replace(patch, apply=lambda name=patch.name: said.append(name)) for patch in PATCHES]
    monkeypatch.setattr(cpu, "_applied", False)
    monkeypatch.setattr(cpu, "PATCHES", patches)
    return said


def test_all_are_applied_but_the_one_left_out(untouched: list[str]) -> None:
    make_megatron_run_on_cpu(without=("to cuda",))
    assert untouched == [name for name in NAMES if name != "to cuda"]


def test_another_megatron_is_refused_before_anything_is_changed(
    monkeypatch: pytest.MonkeyPatch, untouched: list[str]
) -> None:
    monkeypatch.setattr(cpu, "megatron_version", lambda: "0.17.0")
    with pytest.raises(DeviceError, match=r"megatron-core 0\.17\.0 on the CPU.*Install megatron-core==0\.19\.2"):
        make_megatron_run_on_cpu()
    assert untouched == []


@pytest.mark.parametrize(("kind", "patched"), [(Device.cpu, True), (Device.cuda, False), (Device.rocm, False)])
def test_accelerators_are_left_alone(
    kind: Device, patched: bool, untouched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class FirstCallOfMegatron(Exception):
        pass

    def stop(**_: object) -> None:
        raise FirstCallOfMegatron

    monkeypatch.setattr(groups.mpu, "initialize_model_parallel", stop)
    platform: Platform = replace(detect(Device.cpu), kind=kind)
    with pytest.raises(FirstCallOfMegatron):
        groups.init_groups(Layout.of(ParallelConfig(), 1), platform, torch.device("cpu"), seed=1)
    assert untouched == (NAMES if patched else [])
