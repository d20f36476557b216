"""A test whose subject is what ranks and engines do has them forked (tests/support/forked.py); few need them fresh."""

from __future__ import annotations

import ast

from tests.house.source import complaints, python_files, refuse

STARTERS = {"run_ranks": "mcore_rl.parallel.launch", "start_engine": "mcore_rl.rollout.vllm.engine.process"}
# Each with what a fork would take from it.
FRESH = {
    "tests/parallel/test_launch.py": "how ranks start, die and hang",
    "tests/parallel/test_cpu.py": "what importing Megatron does to a process",
    "tests/gpu/": "accelerators, which a forked process cannot share",
    "tests/rollout/vllm/engine/test_process.py": "how engines start, and what is left of them",
    "tests/rollout/vllm/engine/test_vllm_engine_ranks.py": "the death of an engine's rank, and the cores of each",
}


def fresh_starts(path: str, text: str) -> list[str]:
    if not any(name in text for name in STARTERS):
        return []  # without parsing it
    return [
        f"{path}:{node.lineno}: {alias.name} has every process import torch, Megatron or vLLM anew. Take it from "
        f"tests.support.forked, or say in FRESH of {__name__} what a fork would take from the test"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if STARTERS.get(alias.name) == node.module
    ]


def test_only_what_needs_fresh_processes_starts_them() -> None:
    refuse(fresh_starts, [path for path in python_files("tests") if not path.startswith(tuple(FRESH))])


def test_the_rule_refuses_a_fresh_start() -> None:
    assert fresh_starts("tests/sync/test_x.py", "from mcore_rl.parallel.launch import Rank, run_ranks")
    assert fresh_starts("tests/sync/test_x.py", "from mcore_rl.rollout.vllm.engine.process import start_engine")
    assert not fresh_starts("tests/sync/test_x.py", "from tests.support.forked import run_ranks, start_engine")


def test_every_exception_is_still_in_use() -> None:
    for begin in FRESH:
        starts = complaints(fresh_starts, [path for path in python_files("tests") if path.startswith(begin)])
        assert starts, f"{begin} starts none: remove it"
