"""The group of an update's first stage, as it is made: nobody but its members ends a process that is in it."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from mcore_rl.parallel.device_details import UNWATCHED
from mcore_rl.sync import exchange
from mcore_rl.sync.exchange import Exchange


def members() -> Any:
    """A member that is alone."""
    address = SimpleNamespace(join_timeout_s=5.0, timeout_s=5.0, name="alone", store=SimpleNamespace(host="127.0.0.1"))
    return SimpleNamespace(member=0, address=address, store=dist.HashStore(), meet=lambda *_: None)


def test_the_group_is_made_without_a_watchdog_and_no_other_group_is(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, str]] = []
    make = distributed_c10d._new_process_group_helper

    def seen(*args: Any, **kwargs: Any) -> Any:
        made.append(dict(os.environ))
        return make(*args, **kwargs)

    for name in UNWATCHED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(exchange, "listen_towards", lambda _: None)
    monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", seen)
    Exchange(members(), 1, "gloo", torch.device("cpu")).close()
    assert [made[0].get(name) for name in UNWATCHED] == ["1"]
    assert not UNWATCHED.keys() & os.environ.keys()
