"""Copies the model to a disk of this node's own: ``python -m mcore_rl.runtime.stage_model``, once on every node.

``launch/slurm/train.sbatch`` runs it on all nodes at once, before Ray starts, and gives what it prints, the copy's
directory, to the run as ``model.staged``.  What is copied is what a run reads: the files of the directory itself, and
of weights those of safetensors alone.  A copy gets its name when it is whole, with the sizes of the original; one that
is whole already is taken as it is.  How far it is, and what is wrong, is said on stderr.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import psutil
from rich.console import Console

from mcore_rl.ground.errors import ConfigError, Violation

KEY = "cluster.slurm.stage_model"
NO_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")  # weights that nobody here reads
THREADS = 8  # a shared file system gives several streams more than one
CHUNK_BYTES = 16 * 2**20
TOLD_S = 10.0  # between two lines about how far it is
PARTIAL = ".partial"
MEMORY = ("tmpfs", "ramfs")


def files_of(source: Path) -> dict[str, int]:
    """name -> bytes of what a run reads of a checkpoint; links are followed, as those of the Hub's cache.

    ConfigError: it is no checkpoint that can be seen from here.
    """
    try:
        there = [each for each in source.iterdir() if each.is_file() and each.suffix not in NO_WEIGHTS]
        sizes = {each.name: each.stat().st_size for each in there}
    except OSError as error:
        problem = f"cannot be read on this node: {error.strerror}"
        raise ConfigError([Violation("model.path", str(source), problem, _REMEDY)]) from error
    if not any(name.endswith(".safetensors") for name in sizes):
        raise ConfigError([Violation("model.path", str(source), "has no *.safetensors on this node", _REMEDY)])
    return dict(sorted(sizes.items()))


_REMEDY = f"Write a checkpoint that every node sees, or {KEY}= for none"


def place_of(source: Path, sizes: dict[str, int], under: Path, job: str) -> Path:
    """The directory of the copy.  job: its id; "": the copy stays, and other jobs of this user find it."""
    if job:
        return _own(under, job)
    changed = [(source / name).stat().st_mtime_ns for name in sizes]
    mark = sha256(repr((os.getuid(), str(source), list(sizes.items()), changed)).encode()).hexdigest()
    return under / f"mcore-rl-{source.name}-{mark[:16]}"


def _own(under: Path, job: str) -> Path:
    return under / f"mcore-rl-{job}-model"


def remove(under: Path, job: str) -> None:
    """What ``stage`` made, or began to make, for ``job``."""
    own = _own(under, job)
    shutil.rmtree(own, ignore_errors=True)
    shutil.rmtree(own.with_name(own.name + PARTIAL), ignore_errors=True)


def is_whole(copy: Path, sizes: dict[str, int]) -> bool:
    """Whether ``copy`` has every file, of the size that it is to have."""
    return copy.is_dir() and all(
        (copy / name).is_file() and (copy / name).stat().st_size == sizes[name] for name in sizes
    )


def stage(source: Path, under: Path, job: str, say: Callable[[str], None]) -> Path:
    """The directory of a whole copy of ``source`` below ``under``.  job: see ``place_of``.  say: is told how far it is.

    ConfigError: no checkpoint; no such disk, or no room on it; a file that changed while it was copied.
    """
    sizes = files_of(source)
    total = sum(sizes.values())
    copy = place_of(source, sizes, under, job)
    try:
        with _alone(under):
            if is_whole(copy, sizes):
                say(f"{copy} is there already, {_gib(total)}")
                return copy
            partial = copy.with_name(copy.name + PARTIAL)
            shutil.rmtree(partial, ignore_errors=True)  # of a job that was killed
            shutil.rmtree(copy, ignore_errors=True)
            _demand_room(under, total, say)
            partial.mkdir(mode=0o700)
            began = time.monotonic()
            try:
                _copy(source, partial, sizes, say)
                _demand_whole(source, partial, sizes)
                partial.rename(copy)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
    except OSError as error:
        remedy = f"Write a folder of the node's own disk that this user may write to, or {KEY}= for none"
        raise ConfigError([Violation(KEY, str(under), f"{error.strerror}: {error.filename}", remedy)]) from error
    seconds = max(time.monotonic() - began, 1e-3)
    say(f"{copy}: {_gib(total)} in {seconds:.0f} s, {total / seconds / 1e9:.2f} GB/s")
    return copy


@contextmanager
def _alone(under: Path) -> Iterator[None]:
    """One process of this node at a time in ``under``: whoever waited finds the copy."""
    under.mkdir(parents=True, exist_ok=True)
    folder = os.open(under, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _demand_room(under: Path, total: int, say: Callable[[str], None]) -> None:
    free = shutil.disk_usage(under).free
    if total > free:
        problem = f"the model has {_gib(total)}, and {_gib(free)} are free there"
        remedy = f"Write a folder on a larger disk, clear this one, or {KEY}= for none"
        raise ConfigError([Violation(KEY, str(under), problem, remedy)])
    kinds = {Path(each.mountpoint): each.fstype for each in psutil.disk_partitions(all=True)}
    mounted = next((kinds[each] for each in [under.resolve(), *under.resolve().parents] if each in kinds), "")
    if mounted in MEMORY:
        say(f"warning: {under} is {mounted}: the copy takes {_gib(total)} of the node's memory")


def _copy(source: Path, target: Path, sizes: dict[str, int], say: Callable[[str], None]) -> None:
    """Every file, several at a time."""
    total = sum(sizes.values())
    done = 0
    began = time.monotonic()
    lock = threading.Lock()
    told = began

    def copied(count: int) -> None:
        nonlocal done, told
        with lock:
            done += count
            now = time.monotonic()
            if now - told >= TOLD_S:
                told = now
                say(f"{100 * done / total:.0f} %: {_gib(done)} of {_gib(total)}, {done / (now - began) / 1e9:.2f} GB/s")

    def one(name: str) -> None:
        with open(source / name, "rb") as there, open(target / name, "wb") as here:
            while chunk := there.read(CHUNK_BYTES):
                here.write(chunk)
                copied(len(chunk))

    with ThreadPoolExecutor(THREADS) as pool:
        for each in [pool.submit(one, name) for name in sorted(sizes, key=lambda name: -sizes[name])]:
            each.result()


def _demand_whole(source: Path, copy: Path, sizes: dict[str, int]) -> None:
    wrong = [name for name in sizes if (copy / name).stat().st_size != sizes[name]]
    if wrong:
        problem = f"changed while it was copied: {', '.join(wrong)}"
        raise ConfigError([Violation("model.path", str(source), problem, "Begin again when nothing writes to it")])


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the directory of the copy.  Returns the exit code: 0, or 2 where there is none."""
    top = argparse.ArgumentParser(prog="python -m mcore_rl.runtime.stage_model", description=__doc__.split("\n")[0])
    top.add_argument("--node", required=True, help="its name to Slurm")
    top.add_argument("--source", type=Path, required=True, help="the checkpoint")
    top.add_argument("--under", required=True, help="a folder of this node; variables such as $TMPDIR are this node's")
    top.add_argument("--job", default="", help="its id; left out: the copy is to stay, for other jobs")
    top.add_argument("--remove", action="store_true", help="the copy of this job, instead of making it")
    chosen = top.parse_args(arguments)
    told = Console(stderr=True, emoji=False, soft_wrap=True, highlight=False)

    def say(text: str) -> None:
        told.print(f"{chosen.node}: {text}", markup=False)

    try:
        under = os.path.expandvars(chosen.under)
        if not os.path.isabs(under):
            problem = f"is {under!r} on this node, and no absolute path"
            raise ConfigError([Violation(KEY, chosen.under, problem, "Write a path, or a variable that the node has")])
        if chosen.remove:
            remove(Path(under), chosen.job)
            return 0
        copy = stage(chosen.source, Path(under), chosen.job, say)
    except ConfigError as error:
        say(f"error: {error}")
        return 2
    Console(soft_wrap=True, highlight=False).print(str(copy), markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
