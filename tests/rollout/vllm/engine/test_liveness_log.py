"""The first cause, from what vLLM 0.32's processes really wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rl.rollout.vllm.engine.liveness import death, first_cause

WORKER = (
    "(EngineCore pid=31) ERROR 11-21 13:27:40 [multiproc_executor.py:315] Worker proc VllmWorker-1 died unexpectedly "
    "(exit code: {}), shutting down executor.\n"
)
CORE = """\
(EngineCore pid=31) INFO 11-21 13:27:30 [core.py:1] ready
(EngineCore pid=31) ERROR 11-21 13:27:41 [core.py:1512] Traceback (most recent call last):
(EngineCore pid=31) ERROR 11-21 13:27:41 [core.py:1512]     gen.set_offset(gen.get_offset() - 4)
(EngineCore pid=31) ERROR 11-21 13:27:41 [core.py:1512] RuntimeError: CPU Generator does not use offset
(rollout-0 pid=30) ERROR 11-21 13:27:41 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: EngineCore en
Process EngineCore:
RuntimeError: CPU Generator does not use offset
"""
AFTERMATH = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
START = f"ValueError: There is no module or parameter named 'x' in Llama\n{AFTERMATH}"


@pytest.mark.parametrize(
    ("text", "codes", "cause"),
    [
        (WORKER.format(-9) + CORE, {"EngineCore": 1}, "vLLM's VllmWorker-1 was killed by SIGKILL (out of memory?)"),
        (WORKER.format(None), {}, "vLLM's VllmWorker-1 died"),
        (CORE, {"EngineCore": 1}, "RuntimeError: CPU Generator does not use offset"),
        ("", {"EngineCore": -9}, "vLLM's EngineCore was killed by SIGKILL (out of memory?)"),
        ("", {"EngineCore": 3, "other": None}, "vLLM's EngineCore exited with code 3"),
        (START, {}, "ValueError: There is no module or parameter named 'x' in Llama"),
        (AFTERMATH, {}, ""),
        ("all is well", {"EngineCore": None}, ""),
    ],
)
def test_the_first_cause(text: str, codes: dict[str, int | None], cause: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(text)
    assert first_cause(log, codes) == cause


def test_without_a_log_the_exit_codes_tell() -> None:
    assert first_cause(None, {"EngineCore": -11}) == "vLLM's EngineCore was killed by SIGSEGV"
    assert first_cause(Path("/nowhere"), {}) == ""


def test_signals_that_have_no_name() -> None:
    assert death(-63) == "killed by signal 63"
