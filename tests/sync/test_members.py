"""Members meet at a real store; whoever fails, dies or stays away, all who are left name the first cause."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import count
from pathlib import Path

import msgspec
import pytest

from mcore_rl.ground.errors import SyncError
from mcore_rl.parallel.launch import HOST
from mcore_rl.parallel.secret_store import StoreAccess, StoreServer
from mcore_rl.rollout.weight_channel import Opening
from mcore_rl.sync import members as module
from mcore_rl.sync.members import Address, Members, PeerLostError
from mcore_rl.sync.shared_memory import MappedMemory
from tests.support.outsider import as_another_user

NAMES = count()
Open = Callable[..., Address]


@pytest.fixture(scope="module")
def store() -> StoreServer:
    return StoreServer(HOST)


@pytest.fixture
def at(store: StoreServer, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Makes addresses of this test's own; nobody waits long."""
    monkeypatch.setattr(module, "LOOK_S", 0.02)

    def address(num_trainers: int, num_rollout: int, timeout_s: float = 60.0) -> Address:
        return Address(
            store=store.access,
            name=f"test{next(NAMES)}",
            num_trainers=num_trainers,
            num_rollout=num_rollout,
            timeout_s=timeout_s,
            join_timeout_s=timeout_s,
        )

    return address


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def told(members: Members, doing: str, work: Callable[[], object]) -> str:
    """What a member raises when ``work`` fails, as everybody who takes part does it."""
    try:
        work()
    except Exception as error:  # noqa: BLE001  as publish and sync_receive
        return str(members.failed(error, doing))
    return ""


def this_process() -> str:
    return f"(process {os.getpid()} on {os.uname().nodename})"


def test_nobody_leaves_a_meeting_before_all_have_come(at: Open, pool: ThreadPoolExecutor) -> None:
    address, rounds = at(2, 2), 5
    arrived = [threading.Event() for _ in range(4 * rounds)]

    def take_part(member: int) -> None:
        members = Members.joined(address, member)
        for number in range(rounds):
            arrived[4 * number + member].set()
            members.meet(f"round {number}")
            assert all(event.is_set() for event in arrived[4 * number : 4 * number + 4])

    list(pool.map(take_part, range(4)))
    assert Members(address, 0).store.check(["met/6/0"])
    assert not any(Members(address, 0).store.check([f"met/{meeting}/0"]) for meeting in range(1, 6)), "meetings stay"


@pytest.mark.parametrize("call", ["add", "set"])
def test_a_meeting_ends_though_a_member_is_killed_in_the_middle_of_coming(
    call: str, at: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = at(1, 1)
    first, killed = Members(address, 0), Members(address, 1)
    if call == "set":  # the last to come, which tells the others
        first.set("met/1/0", b"")
        first.store.add("met/1/count", 1)

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        if call == "add":
            patched.setattr(killed.store, "add", dies)
        else:
            usual = killed.set
            patched.setattr(killed, "set", lambda key, value: dies() if key.endswith("/all") else usual(key, value))
        with pytest.raises(KeyboardInterrupt):
            killed.meet("version 1")
    assert killed.store.check(["met/1/1"]) and not killed.store.check(["met/1/all"])
    first.meet("version 1", 20.0)


def test_what_a_member_puts_down_is_there_until_it_is_deleted(at: Open) -> None:
    address = at(1, 1)
    one, other = Members(address, 0), Members(address, 1)
    one.set("a key", b"\x00\xff")
    assert other.get("a key", 0) == b"\x00\xff"
    other.delete("a key")
    assert not one.store.check(["a key"])
    assert not Members(at(1, 1), 1).store.check(["member/0"]), "another channel of the same store sees it"


def test_titles() -> None:
    address = Address(store=StoreAccess(host=HOST, port=1, secret=b""), name="x", num_trainers=2, num_rollout=3)
    assert [address.title(member) for member in (0, 1, 2, 4)] == [
        "training rank 0",
        "training rank 1",
        "rollout rank 0",
        "rollout rank 2",
    ]
    assert address.num_members == 5


def test_all_name_the_one_that_failed_and_what_it_did(at: Open, pool: ThreadPoolExecutor) -> None:
    address = at(2, 2)
    joined = list(pool.map(lambda member: Members.joined(address, member), range(4)))

    def fail() -> None:
        raise ValueError("disk full\nand more")

    waits = [pool.submit(told, joined[n], "receiving", lambda n=n: joined[n].meet("applied")) for n in (0, 2, 3)]
    reports = {told(joined[1], "publishing version 7", fail), *(waiting.result() for waiting in waits)}
    assert reports == {
        f"training rank 1 {this_process()} failed while publishing version 7: ValueError: disk full\nand more. "
        "The rollout ranks hold no complete weights: restart what failed, open a channel and publish"
    }


def test_of_two_that_fail_the_first_is_named_and_never_one_whose_peer_is_gone(
    at: Open, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GRACE_S", 60.0)
    address = at(1, 2)
    joined = list(pool.map(lambda member: Members.joined(address, member), range(3)))

    def fail(error: Exception) -> Callable[[], None]:
        def work() -> None:
            raise error

        return work

    first = pool.submit(told, joined[0], "receiving", fail(ConnectionError("closed by peer")))  # earliest, and no cause
    while not joined[1].store.check(["failure/0"]):
        pass
    assert not wait([first], 0.3).done, "it must wait for one who knows more"
    second = told(joined[2], "receiving version 3", fail(KeyError("w13")))
    last = told(joined[1], "receiving version 3", fail(RuntimeError("something else")))
    for report in (first.result(), second, last):
        assert report.startswith(f"rollout rank 1 {this_process()} failed while receiving version 3: KeyError: 'w13'")


def test_one_that_is_silent_is_named_in_time(at: Open) -> None:
    address = at(1, 1, timeout_s=1.0)
    Members(address, 1)  # it came, and says nothing more
    waiting = Members(address, 0)
    with pytest.raises(PeerLostError, match=r"rollout rank 0 timed out: nothing came for 1 s") as caught:
        waiting.get("weights", 1)
    assert caught.value.peer == 1
    report = told(waiting, "publishing version 2", lambda: waiting.get("weights", 1, timeout_s=0.1))
    head = f"rollout rank 0 {this_process()} is gone, killed or stuck, while others were publishing version 2"
    assert report.startswith(f"{head} (training rank 0 {this_process()} says: PeerLostError: rollout rank 0 timed out")


def test_a_channel_that_one_never_comes_to(at: Open) -> None:
    with pytest.raises(SyncError, match=r"^rollout rank 0 is gone, killed or stuck, while others were opening the "):
        Members.joined(at(1, 1, timeout_s=1.0), 0)


def _join_and_wait(address: Address, member: int) -> None:
    Members.joined(address, member).get("what never comes", 0)


def test_the_killed_are_named_before_any_time_is_up(at: Open, pool: ThreadPoolExecutor, processes: None) -> None:
    """Both ranks of an engine, as an engine ends them; nobody waits for them yet, so that they are zombies."""
    address = at(2, 2, timeout_s=200.0)  # more than a test may take
    context = multiprocessing.get_context("spawn")
    engine = [context.Process(target=_join_and_wait, args=(address, member)) for member in (2, 3)]
    for process in engine:
        process.start()
    joined = list(pool.map(lambda member: Members.joined(address, member), range(2)))
    waits = [pool.submit(told, each, "publishing version 1", lambda e=each: e.meet("applied")) for each in joined]
    for process in engine:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
    named = [f"rollout rank {rank} (process {process.pid} on " for rank, process in enumerate(engine)]
    for waiting in waits:
        assert waiting.result().startswith(named[0])
        assert "gone, killed or stuck, while others were publishing version 1" in waiting.result()
    for process in engine:
        process.join()


def test_one_that_dies_beside_one_that_fails_is_aftermath(at: Open, pool: ThreadPoolExecutor) -> None:
    address = at(1, 2)
    here = list(pool.map(lambda member: Members.joined(address, member) if member < 2 else _dead(address, 2), range(3)))

    def fail() -> None:
        raise ValueError("the cause")

    report = told(here[1], "receiving version 1", fail)
    assert report.startswith(f"rollout rank 0 {this_process()} failed while receiving version 1: ValueError: the cause")
    assert told(here[0], "publishing version 1", lambda: here[0].get("x", 2)) == report


def test_all_ranks_of_an_engine_that_is_gone_are_named(at: Open, pool: ThreadPoolExecutor) -> None:
    address = at(1, 2)
    here = list(
        pool.map(lambda member: Members.joined(address, member) if member < 1 else _dead(address, member), range(3))
    )
    report = told(here[0], "publishing version 1", lambda: here[0].get("x", 2))
    pids = [msgspec.json.decode(here[0].store.get(f"member/{member}"))[1] for member in (1, 2)]
    named = [f"rollout rank {rank} (process {pid} on {os.uname().nodename})" for rank, pid in enumerate(pids)]
    assert report.startswith(f"{named[0]} and {named[1]} are gone, killed or stuck, while others were publishing")


class _Elsewhere(Members):
    """One that says that it is the process ``own``."""

    def __init__(self, address: Address, member: int, own: int) -> None:
        self.own = own
        super().__init__(address, member)

    def set(self, key: str, value: bytes) -> None:
        person = msgspec.json.encode((os.uname().nodename, self.own))
        super().set(key, person if key.startswith("member/") else value)


def _dead(address: Address, member: int) -> Members:
    """One that joined from a process that is not there any more."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) as process:
        members = _Elsewhere(address, member, process.pid)
        members.meet("the channel", 60.0)
        process.kill()
    return members


def test_without_a_store_a_member_still_says_its_own() -> None:
    program = (
        "from mcore_rl.parallel.secret_store import StoreServer; import sys\n"
        f"store = StoreServer({HOST!r}).access\n"
        "print(store.port, store.secret.hex(), flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1, text=True) as server:
        assert server.stdout is not None
        port, secret = server.stdout.readline().split()
        access = StoreAccess(host=HOST, port=int(port), secret=bytes.fromhex(secret))
        members = Members(Address(store=access, name="x", num_trainers=1, num_rollout=1, timeout_s=1.0), 0)
        server.kill()
        server.wait()
        error = members.failed(ValueError("the cause"), "publishing version 1")
    head = "training rank 0 failed while publishing version 1: ValueError: the cause. The store at"
    assert str(error).startswith(f"{head} {HOST}:{port}, where members meet, does not answer")


# ---- what others write ----

# What reached a run's members before: torch's own client, as any user of the machine could start it.
IMPORTS = "from datetime import timedelta\nfrom torch.distributed import TCPStore"
TORCH_S_CLIENT = """
host, port, key, value = sys.argv[1], int(sys.argv[2]), sys.argv[3], bytes.fromhex(sys.argv[4])
try:
    TCPStore(host, port, is_master=False, timeout=timedelta(seconds=3)).set(key, value)
    print("set")
except Exception:
    print("refused")
"""


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.mark}",)


@pytest.fixture
def members(store: StoreServer) -> Members:
    return Members(Address(store=store.access, name=f"m{next(NAMES)}", num_trainers=1, num_rollout=1, timeout_s=1.0), 0)


def test_another_user_who_says_what_torch_s_store_understands_changes_nothing(
    store: StoreServer, members: Members, tmp_path: Path
) -> None:
    pickled = pickle.dumps(Evil(tmp_path / "evil")).hex()
    tried = as_another_user(
        TORCH_S_CLIENT, HOST, store.access.port, f"{members.address.name}/member/1", pickled, imports=IMPORTS
    )
    assert tried.endswith("refused\n")
    assert not members.store.check(["member/1"])
    assert "ConnectionError: closed by peer" in str(members.failed(ConnectionError("closed by peer"), "publishing"))
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("key", ["member/1", "failure/1"])
def test_even_a_member_s_pickle_is_not_read(members: Members, tmp_path: Path, key: str) -> None:
    members.set(key, pickle.dumps(Evil(tmp_path / "evil")))
    error = members.failed(ValueError("the cause"), "publishing")
    assert "training rank 0 failed while publishing: ValueError: the cause" in str(error)
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("message", [b"", b"{}", b"[1]", b'{"family": 3}', pickle.dumps(Evil(Path("/nowhere/evil")))])
def test_an_opening_is_typed(message: bytes) -> None:
    with pytest.raises(SyncError, match="The weight channel's opening cannot be read"):
        Opening.unpacked(message)


def test_the_handle_of_mapped_memory_is_numbers() -> None:
    for handle in (b"", b"1 2 3", b"1 2 ../../etc/passwd 4", pickle.dumps(Evil(Path("/nowhere/evil")))):
        with pytest.raises(ValueError, match=r"."):
            MappedMemory().map(handle)


def test_what_members_write_is_json(members: Members) -> None:
    host, pid = msgspec.json.decode(members.store.get("member/0"))
    assert (host, pid) == (os.uname().nodename, os.getpid())
