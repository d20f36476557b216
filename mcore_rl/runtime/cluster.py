"""Starts Ray on this machine or joins a cluster; the run ends with Ray's head or raylet, and these with it.

By itself, Ray ends a program whose raylet died within a second, and one whose head (its GCS) died after a minute:
from C++, with exit code 1, without a word of what to do.  And a program that is killed leaves two agents for a minute.
Here both deaths are noticed at once, told in one message with the remedy, and end the program with ``os.EX_TEMPFAIL``,
at which a launcher begins it again; and a guard ends what the program leaves.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # compiled
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console

from mcore_rl.config.trainer import RayInitConfig
from mcore_rl.ground.errors import ConfigError, Violation, WorkerError
from mcore_rl.ground.secrets import secret_names
from mcore_rl.parallel.device import num_cores
from mcore_rl.parallel.device_details import interfaces
from mcore_rl.parallel.launch import inherited_environment
from mcore_rl.processes.guarding import guard_beside
from mcore_rl.runtime.scratch import scratch
from mcore_rl.tracking.messages import warn

LOOPBACK = "127.0.0.1"
KNOCK_S = 8.0  # the time limit for a head node to accept a connection, and for its first words
ASK = "import sys; from ray._raylet import GcsClient; print(flush=True); GcsClient(address=sys.argv[1])"
SETTINGS = 4  # a frame's type (RFC 9113, 6.5)
# Ray's monitor shows its numbers to anyone, at one port of a machine; where it cannot listen, it says so in its log.
NO_MONITOR_PORT = {"AUTOSCALER_METRIC_PORT": "-1"}
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, SETTINGS, 0, 0, 0, 0, 0])
SETTINGS_HEAD = bytes(9)  # of a frame: 3 bytes of length, type, flags, 4 of the stream
VITAL = {"gcs_server": "Ray's head", "raylet": "Ray's raylet on this machine"}
LOOK_S = 5.0  # between two looks whether a process is stopped
STOPPED_S = 30.0  # a process that is stopped (SIGSTOP) for so long is as good as dead: nothing else notices it
GRACE_S = 5.0  # how long a regular shutdown of Ray may take
GUARD_S = 2 * GRACE_S  # the time limit for the guard to finish


@contextmanager
def ray_cluster(config: RayInitConfig, remedy: Callable[[], str] = lambda: "Begin again.") -> Iterator[None]:
    """Connects to Ray; on exit, writes its timeline and stops what it started here.

    If Ray's head or this machine's raylet dies meanwhile, the program ends at once with ``os.EX_TEMPFAIL`` and one
    message, which ends with ``remedy``.

    ``config.num_cpus=None`` is the number of cores that this process may use, which may be fewer than the machine has,
    as under Slurm.

    Raises ConfigError if no cluster answers at ``config.address``, WorkerError if Ray cannot be started here.
    """
    with ExitStack() as stack:
        if not ray.is_initialized():
            if config.address is not None:
                with _refusing(config.address):
                    _knock(config.address)
            folder = stack.enter_context(scratch())
            before = children()
            on_sigterm = signal.getsignal(signal.SIGTERM)
            _connect(config, folder, stack)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own handler ends the program, with exit code 15
            stack.enter_context(own_ray(before, remedy) if config.address is None else joined_ray(remedy))
        try:
            yield
        finally:
            if config.timeline_json_file is not None:
                try:
                    Path(config.timeline_json_file).parent.mkdir(parents=True, exist_ok=True)
                    ray.timeline(config.timeline_json_file)
                except OSError as error:  # the run itself has ended well
                    warn(f"ray_init.timeline_json_file={config.timeline_json_file} cannot be written: {error}")


def _connect(config: RayInitConfig, folder: Path, stack: ExitStack) -> None:
    options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    if config.address is None:
        cpus = num_cores() if config.num_cpus is None else config.num_cpus
        # Ray's processes, and so all workers, start without secrets, except those that Ray itself reads.
        hidden = {name for name in secret_names() if not name.startswith("RAY_")}
        stack.enter_context(_token(folder))
        kept = os.environ.get("RAY_TMPDIR")  # whoever sets it wants Ray's logs to stay
        alone = {"VLLM_HOST_IP": LOOPBACK, **interfaces(LOOPBACK)}  # what all that Ray starts here listens at
        with inherited_environment({**dict.fromkeys(hidden), **alone, **NO_MONITOR_PORT}):
            try:
                # "local": never a cluster that others run here
                ray.init(address="local", num_cpus=cpus, _temp_dir=f"{kept or folder}/ray", **options)
            except Exception as error:  # of many classes: it could not write, listen, or one of its processes died
                how = "Begin again; with RAY_TMPDIR=DIR, a short path, Ray's logs stay in DIR"
                raise WorkerError(f"Ray did not start: {_first_line(error)}. {how}.") from error
        return
    with _refusing(config.address):
        ray.init(address=config.address, **options)


def _first_line(error: Exception) -> str:
    """What ``error`` says first, or its class where it says nothing."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


@contextmanager
def _refusing(address: str) -> Iterator[None]:
    """Raises ConfigError for what is raised within where no cluster answers at ``address``."""
    try:
        yield
    except (OSError, ValueError) as error:
        problem = f"no Ray cluster answers there: {_first_line(error)}"
        remedy = "Start one with ray start --head, or leave ray_init.address out to start one here"
        raise ConfigError([Violation("ray_init.address", address, problem, remedy)]) from error


@contextmanager
def _token(folder: Path) -> Iterator[None]:
    """Within: Ray's processes answer only those who know a token, which lies in ``folder``, readable by the user alone.

    Ray's own default is one token for all clusters, in a file of the home directory that others may read.
    """
    path = folder / "ray_token"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    wanted = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path), "RAY_AUTH_TOKEN": None}
    try:
        with inherited_environment(wanted):
            _read_authentication_anew()
            yield
    finally:
        path.unlink(missing_ok=True)
        _read_authentication_anew()


def _read_authentication_anew() -> None:
    """Lets Ray's library in this process read RAY_AUTH_*, in its own order (ray 2.60, authentication_test_utils.py)."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def _knock(address: str) -> None:
    """Raises OSError or ValueError if what is at HOST:PORT does not speak as Ray does, which would try for minutes.

    Ray speaks gRPC, whose servers answer the first bytes of a client with a frame of settings (RFC 9113, 3.4).
    """
    host, colon, port = address.rpartition(":")
    if not colon or "/" in address:  # "auto", or a URL of Ray's client
        return
    with socket.create_connection((host, int(port)), KNOCK_S) as connection:
        connection.sendall(HTTP2_PREFACE)
        answer = b""
        until = time.monotonic() + KNOCK_S
        while len(answer) < len(SETTINGS_HEAD):
            connection.settimeout(max(0.001, until - time.monotonic()))
            try:
                more = connection.recv(len(SETTINGS_HEAD) - len(answer))
            except TimeoutError:
                raise OSError(f"something listens and says nothing for {KNOCK_S:.0f} s") from None
            answer += more
            if not more:
                break
    if len(answer) < len(SETTINGS_HEAD) or answer[3] != SETTINGS:
        raise OSError("something else listens there, which speaks no gRPC")
    _ask_for_cluster(address)


def _ask_for_cluster(address: str) -> None:
    """Raises OSError if the gRPC server at ``address`` does not answer a client of Ray's head.

    The client keeps to no time limit, so it runs in a process of its own.  A refusal of this user is left to
    ``ray.init``, which explains it.
    """
    command = [sys.executable, "-c", ASK, address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as asks:
        assert asks.stdout is not None
        asks.stdout.readline()  # it has imported Ray
        try:
            _, said = asks.communicate(timeout=KNOCK_S)
        except subprocess.TimeoutExpired:
            asks.kill()
            raise OSError(f"a server of gRPC that has not answered as Ray's head does, for {KNOCK_S:.0f} s") from None
    if asks.returncode and "authenticat" not in said.lower():
        raise OSError(f"a server of gRPC that is no head of Ray's ({said.strip().splitlines()[-1]})")


def on_node(function: Callable[..., Any], node_id: str, **options: Any) -> Any:
    """``function`` as a task of Ray's on that node alone, whatever else runs there."""
    place = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(function).options(num_cpus=0, scheduling_strategy=place, **options)


def meeting_host(config: RayInitConfig) -> str:
    """Where the run's own store listens: at the loopback if Ray was started here, else where other nodes reach it."""
    return LOOPBACK if config.address is None else this_host()


def this_host() -> str:
    """The address at which other nodes of the cluster reach this machine."""
    return str(ray.util.get_node_ip_address())


@dataclass(frozen=True)
class Held:
    """A process of Ray's.  handle: its pidfd, which is readable once the process has ended."""

    name: str
    pid: int
    handle: int

    def kill(self) -> None:
        """Kills the process; does nothing if it has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)


@contextmanager
def own_ray(before: set[psutil.Process], remedy: Callable[[], str]) -> Iterator[None]:
    """Watches Ray's processes while active; on exit, ends all of them.

    before: the children of this process before Ray was started; all other children are Ray's.
    remedy: gives the end of the message if one dies, which says how to go on.
    """
    with ExitStack() as stack:
        held = _held(children() - before, stack)
        handles = [each.handle for each in held]
        stack.enter_context(guard_beside(grace_s=GRACE_S, processes=handles, limit_s=GUARD_S))
        stack.callback(ray.shutdown)
        stack.enter_context(_watched([each for each in held if each.name in VITAL], held, remedy))
        yield


@contextmanager
def joined_ray(remedy: Callable[[], str]) -> Iterator[None]:
    """For a cluster that others started: watches the processes that this program needs; on exit, the cluster goes on.

    They are the raylet of this machine, and Ray's head if it is on this machine.
    """
    address = ray.get_runtime_context().gcs_address
    here = ray.util.get_node_ip_address()
    host, _, port = address.rpartition(":")
    vital = _running("raylet", {f"--gcs-address={address}", f"--node_ip_address={here}"})
    if host == here:
        vital |= _running("gcs_server", {f"--gcs_server_port={port}", f"--node-ip-address={here}"})
    with ExitStack() as stack:
        stack.callback(ray.shutdown)
        stack.enter_context(_watched(_held(vital, stack), [], remedy))
        yield


def children() -> set[psutil.Process]:
    """The children of this process, and their descendants."""
    return set(psutil.Process().children(recursive=True))


def _running(name: str, words: set[str]) -> set[psutil.Process]:
    """The processes of this machine called ``name`` that have all ``words`` on their command line."""
    processes = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.name() == name and words <= set(process.cmdline()):
                processes.add(process)
    return processes


def _held(processes: Iterable[psutil.Process], stack: ExitStack) -> list[Held]:
    held = []
    for process in processes:
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            handle = os.pidfd_open(process.pid)
            stack.callback(os.close, handle)
            held.append(Held(process.name(), process.pid, handle))
    return held


def lost_of(vital: Sequence[Held], until: int) -> tuple[Held, str] | None:
    """Waits until one of ``vital`` has ended or was stopped too long; returns it, and what became of it.

    None: the descriptor ``until`` was closed before.
    """
    poller = select.poll()
    for handle in (until, *(each.handle for each in vital)):
        poller.register(handle, select.POLLIN)
    since = dict[int, float]()  # by process, when it was first seen stopped
    while True:
        ended = {handle for handle, _ in poller.poll(1000 * LOOK_S)}
        if until in ended:
            return None
        for each in vital:
            if each.handle in ended:
                return each, "died"
            if not _is_stopped(each.pid):
                since.pop(each.pid, None)
            elif time.monotonic() - since.setdefault(each.pid, time.monotonic()) >= STOPPED_S:
                return each, f"has been stopped (SIGSTOP) for {STOPPED_S:.0f} s"


def _is_stopped(pid: int) -> bool:
    with suppress(psutil.Error):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False


@contextmanager
def _watched(vital: Sequence[Held], all_held: Sequence[Held], remedy: Callable[[], str]) -> Iterator[None]:
    """While active: if one of ``vital`` ends or is stopped, kills ``all_held`` and ends this program with a message."""
    reading, writing = os.pipe()

    def watch() -> None:
        if (loss := lost_of(vital, reading)) is not None:
            lost, how = loss
            Console(stderr=True).show_cursor()
            message = f"\nerror: {VITAL[lost.name]} ({lost.name}, process {lost.pid}) {how}. {remedy()}\n"
            os.write(sys.stderr.fileno(), message.encode())
            for each in all_held:
                each.kill()
            os._exit(os.EX_TEMPFAIL)  # this program cannot go on without it; Ray would end it a moment later

    thread = threading.Thread(target=watch, name="Ray's processes", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.close(writing)
        thread.join()
        os.close(reading)
