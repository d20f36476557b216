"""``mcore-rl models``: every model of ``model_configs/`` by name, and one of them."""

from __future__ import annotations

import pytest

from mcore_rl.cli import main
from tests.support.published import FACTS, MODEL_CONFIGS


def test_every_model_has_its_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["models"]) == 0
    rows = [line.split(maxsplit=3) for line in capsys.readouterr().out.splitlines()[1:]]
    assert {row[2] for row in rows} == set(FACTS)
    (presets,) = (row[3] for row in rows if row[0] == "mixtral-8x22b-instruct-v0.1")
    assert presets.strip() == "h100_80gb: 64, h200_141gb: 32, mi300x_192gb: 16"


def test_one_is_the_file_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "mixtral-8x22b"]) == 0
    path = MODEL_CONFIGS / "mixtral" / "mixtral-8x22b-instruct-v0.1.yaml"
    assert capsys.readouterr().out == path.read_text(encoding="utf-8")
    assert main(["models", "mixtral-9x22b"]) == 2
    assert "is no known checkpoint. Write one of mixtral-8x22b" in capsys.readouterr().err
