"""What a node says of itself."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from mcore_rl.config.engine import Device
from mcore_rl.parallel.device import num_cores
from mcore_rl.runtime import nodes
from mcore_rl.runtime.nodes import facts_here, main


def test_a_node_of_cores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    marker = tmp_path / "here"
    marker.touch()
    with socket.create_server(("127.0.0.1", 0)) as held:
        listen = f"127.0.0.1:{held.getsockname()[1]}"
        arguments = ["--device", "cpu", "--marker", str(marker), "--head", "n1", "--listen", listen]
        assert main(["facts", "--node", "n1", *arguments]) == 0
        assert main(["facts", "--node", "n2", *arguments]) == 0
    head, other = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert head["port_taken"] == f"{listen}: Address already in use" and other["port_taken"] == ""
    assert (head["num_devices"], head["driver"], head["error"]) == (0, "", "") and head["num_cores"] == num_cores()
    assert head["sees_run"] is True and head["host"] == socket.gethostname()


def test_what_is_missing_is_a_fact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "PATIENCE_S", 0.0)
    facts = facts_here("n1", Device.rocm, tmp_path / "absent", None)
    assert not facts.sees_run and "device=rocm: torch" in facts.error and facts.num_devices == 0
