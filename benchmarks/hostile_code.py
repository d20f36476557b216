"""Hostile programs by the thousand through the real scorer: what the machine feels of them.

    python benchmarks/hostile_code.py [--samples 1000] [--workers 16] [--json results.json]

All responses are handed to the scorer at once.  Half are honest and have to pass; the other half takes turns through
``HOSTILE``: bombs of processes, threads, memory and output, and programs that do not end.  Exits with 1 where an honest
one does not pass or a hostile one does, where processes, threads or memory exceed what the workers are allowed, where
one is left at the end, or where it takes longer than every program's time limit over the workers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from mcore_rl.config.reward import CodeConfig, RewardConfig
from mcore_rl.rewards.confinement import MAX_THREADS
from mcore_rl.rewards.score import RewardRequest
from mcore_rl.rewards.scorer import Scorer

PAGE = os.sysconf("SC_PAGE_SIZE")
OWN_COMMAND = Path("/proc/self/cmdline").read_bytes()
WORKER_BYTES = 64 << 20  # of a grading process, resident
LATE_THREADS = 20_000  # a bomb's between two looks at it, where the looker waits for a core; pids end at 32,768
HONEST = "n = int(input())\nprint(2 * n)"
# Starts threads by the kernel's own call, on one stack, so that the address space does not limit them.
RAW_THREADS = """
import ctypes, os, time
libc = ctypes.CDLL(None)
stack = ctypes.create_string_buffer(1 << 16)
top = ctypes.c_void_p(ctypes.addressof(stack) + (1 << 15))
wait = ctypes.cast(libc.pause, ctypes.c_void_p)
for started in range({limit}):
    if libc.clone(wait, top, 0x10000 | 0x100 | 0x200 | 0x400 | 0x800 | 0x40000, None) < 0:
        break
print(started + 1, flush=True)
time.sleep({sleep_s})
os._exit(0)
"""
HOSTILE = {
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "processes": "import subprocess, sys\nwhile True:\n"
    "    try: subprocess.Popen([sys.executable, '-c', 'while True: pass'])\n    except OSError: pass",
    "threads": "import threading, time\nthreading.stack_size(1 << 16)\nwhile True:\n"
    "    try: threading.Thread(target=time.sleep, args=(600,)).start()\n    except Exception: pass",
    "raw threads": RAW_THREADS.format(limit=10**9, sleep_s=600),
    "memory": "x = []\nwhile True:\n    try: x.append(bytearray(10**7))\n    except MemoryError: pass",
    "mapped memory": "import mmap\nx = []\nwhile True:\n    try:\n        x.append(mmap.mmap(-1, 10**7))\n"
    "        x[-1].write(bytes(10**7))\n    except OSError: pass",
    "pipes": "import os\nx = []\nwhile True:\n    try:\n        a, b = os.pipe(); os.set_blocking(b, False)\n"
    "        os.write(b, bytes(1 << 20))\n    except OSError: pass",
    "output": "import os\nwhile True:\n    for d in (1, 2):\n"
    "        try: os.write(d, b'x' * 65536)\n        except OSError: pass",
    "loop": "while True: pass",
    "sleep that ignores signals": "import signal, time\nfor n in range(1, 65):\n"
    "    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: time.sleep(600)",
    "sleep": "import time\nwhile True: time.sleep(600)",
    "stopped": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "recursion": "import sys\nsys.setrecursionlimit(10**9)\nf = lambda: f()\nf()",
    "regular expression": "import re\nre.match('(a*)*b', 'a' * 1000)",
    "huge integer": "x = 10\nwhile True: x *= x",
    "kills all": "import os, signal\nfor pid in (-1, 0, os.getppid(), -os.getppid()):\n"
    "    try: os.kill(pid, signal.SIGKILL)\n    except OSError: pass\nwhile True: pass",
}


class Watch:
    """What processes take that are started below this one, looked at a hundred times a second; a context manager.

    processes, threads: the most at once.  memory_bytes: the most that their resident sets were together, in which pages
    that they share count for each.  Those that were there before do not count.
    """

    def __init__(self) -> None:
        self.processes = self.threads = self.memory_bytes = 0
        self._before = set(descendants())
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="watch")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _look_on(self) -> None:
        while not self._done.wait(0.01):
            below = [pid for pid in descendants() if pid not in self._before]
            self.processes = max(self.processes, len(below))
            self.threads = max(self.threads, sum(map(_threads, below)))
            self.memory_bytes = max(self.memory_bytes, sum(map(_resident, below)))


def descendants() -> list[int]:
    """The processes below this one."""
    pids: list[int] = []
    asked = [os.getpid()]
    while asked:
        pid = asked.pop()
        with suppress(OSError):  # it has ended
            for thread in os.listdir(f"/proc/{pid}/task"):
                children = Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
                pids += map(int, children)
                asked += map(int, children)
    return pids


def _threads(pid: int) -> int:
    with suppress(OSError):
        return os.stat(f"/proc/{pid}/task").st_nlink - 2
    return 0


def _resident(pid: int) -> int:
    """0 between fork and exec, when all of its memory is this process's."""
    with suppress(OSError, IndexError):
        if Path(f"/proc/{pid}/cmdline").read_bytes() == OWN_COMMAND:
            return 0
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    return 0


@dataclass(frozen=True, kw_only=True)
class Result:
    """Of one pass.  wrong: honest programs that did not pass and hostile ones that did.  left: processes at the end."""

    samples: int
    workers: int
    wall_s: float
    peak_processes: int
    peak_threads: int
    peak_memory_mib: int
    wrong: tuple[str, ...]
    left: int

    def violations(self, config: RewardConfig) -> list[str]:
        """What exceeded its bound, in words."""
        memory_mib = self.workers * ((WORKER_BYTES >> 20) + config.code.memory_mib)
        limits = {
            "processes": (self.peak_processes, 3 * self.workers),  # a guard, a grading process and its program
            "threads": (self.peak_threads, self.workers * (1 + MAX_THREADS) + LATE_THREADS),
            "MiB": (self.peak_memory_mib, memory_mib),
            "seconds": (self.wall_s, 60 + 2 * config.code.timeout_s * math.ceil(self.samples / self.workers)),
            "processes left": (self.left, 0),
        }
        complaints = [f"{is_:g} {what}, {most:g} are allowed" for what, (is_, most) in limits.items() if is_ > most]
        return complaints + [f"{len(self.wrong)} graded wrongly: {self.wrong[:5]}"] * bool(self.wrong)


def measure(samples: int, config: RewardConfig) -> Result:
    """``samples`` responses at once, of which every other is honest."""
    kinds = [list(HOSTILE)[k // 2 % len(HOSTILE)] if k % 2 else "honest" for k in range(samples)]
    cases = {"inputs": ["21"], "outputs": ["42"]}
    requests = [RewardRequest((kind, k), "code", HOSTILE.get(kind, HONEST), cases) for k, kind in enumerate(kinds)]
    before = set(descendants())
    started = time.monotonic()
    with Watch() as watch, Scorer(config) as scorer:
        scores = asyncio.run(scorer.score_all(requests))
    wall_s = time.monotonic() - started
    assert config.num_workers is not None
    return Result(
        samples=samples,
        workers=config.num_workers,
        wall_s=wall_s,
        peak_processes=watch.processes,
        peak_threads=watch.threads,
        peak_memory_mib=watch.memory_bytes >> 20,
        wrong=tuple(
            f"{kind}: {score}"
            for kind, score in zip(kinds, scores, strict=True)
            if score.error is not None or score.value != float(kind == "honest")
        ),
        left=len(set(descendants()) - before),
    )


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--timeout-s", type=float, default=CodeConfig().timeout_s)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    config = RewardConfig(num_workers=chosen.workers, code=CodeConfig(timeout_s=chosen.timeout_s))
    result = measure(chosen.samples, config)
    print(json.dumps(asdict(result), indent=2))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(asdict(result), indent=2) + "\n")
    for violation in (complaints := result.violations(config)):
        print(f"FAILED: {violation}", file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
