"""The group of an update's first stage, as it is made: nobody but its members ends a process that is in it."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, distributed_c10d

from mcore_rl.ground.errors import SyncError
from mcore_rl.parallel.device_details import UNWATCHED
from mcore_rl.sync import routed
from mcore_rl.sync.routed import Exchange


def members() -> Any:
    """A member that is alone."""
    address = SimpleNamespace(join_timeout_s=5.0, timeout_s=5.0, name="alone", store=SimpleNamespace(host="127.0.0.1"))
    return SimpleNamespace(member=0, address=address, store=HashStore(), meet=lambda *_: None)


class HungGroup:
    """Of the vendor's library: its first call is never done."""

    group_name = "sync_alone"
    is_aborted = False

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        return SimpleNamespace(is_completed=lambda: False)

    def abort(self) -> None:
        self.is_aborted = True


def test_the_group_is_made_without_a_watchdog_and_no_other_group_is(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, str]] = []
    make = distributed_c10d._new_process_group_helper

    def seen(*args: Any, **kwargs: Any) -> Any:
        made.append(dict(os.environ))
        return make(*args, **kwargs)

    for name in UNWATCHED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(routed, "listen_towards", lambda _: None)
    monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", seen)
    Exchange(members(), 1, "gloo", torch.device("cpu")).close()
    assert [made[0].get(name) for name in UNWATCHED] == ["1"]
    assert not UNWATCHED.keys() & os.environ.keys()


def test_the_first_call_of_the_vendors_library_ends_where_a_member_reports_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A group without a watchdog would wait for it as long as a transfer may take."""
    group = HungGroup()
    monkeypatch.setattr(Exchange, "_join", lambda *_: group)
    monkeypatch.setattr(torch._C._distributed_c10d, "_unregister_process_group", lambda _: None)
    alone = members()
    alone.look_around = fail
    with pytest.raises(SyncError, match="rollout rank 3"):
        Exchange(alone, 2, "the vendor's", torch.device("cpu"))
    assert group.is_aborted, "else its kernel would spin on the device"


def fail(_: object) -> None:
    raise SyncError("rollout rank 3 is gone")
