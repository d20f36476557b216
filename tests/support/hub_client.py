"""A Hub of this machine, and a client of it with a cache of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.support.hub_server import HubServer, hub_server


def ask(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the client of this process, which read HF_ENDPOINT at its import, ask at ``url``."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    )


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """An empty Hub, which the client of this process asks; its cache is ``tmp_path/hub``."""
    with hub_server() as server:
        ask(server.url, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield server
