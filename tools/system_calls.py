"""Writes docs/system_calls.md: each system call of Linux, and whether a program that a model wrote may make it.

    python tools/system_calls.py

The page is made from the tables of mcore_rl/rewards/system_calls.py, which the filter is made from too.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # also where the package is not installed

from mcore_rl.rewards.system_calls import ABSENT, ALLOWED, CHECKED, NEWEST, REFUSED

PAGE = Path(__file__).parents[1] / "docs" / "system_calls.md"
HEAD = f"""# What a program may ask the kernel

Made by `python tools/system_calls.py` from `mcore_rl/rewards/system_calls.py`; do not edit. The seccomp filter of
[programs that models write](rewards.md#what-programs-may-do) is an allowlist: **a call that is not allowed here is
refused**, also one that Linux adds after this page was written. The same filter holds the tests that judge a program.

- x86-64 and aarch64, each with its own numbers. Calls by another table (32-bit, x32) are refused or end the process.
- Refused is EPERM. Calls above number {NEWEST} get ENOSYS, as an older kernel answers, and so do calls that take their
  flags by pointer, where a filter cannot look; libraries then take an older call.
- A dash: the processor has no such call.

"""


def document() -> str:
    """The text of docs/system_calls.md."""
    lines = [HEAD, "## Allowed\n", "| call | x86-64 | aarch64 | for |", "|---|---|---|---|"]
    for purpose, calls in ALLOWED.items():
        lines += [f"| `{name}` | {_number(x86)} | {_number(arm)} | {purpose} |" for name, (x86, arm) in calls.items()]
    lines += [
        "\n## Allowed with these arguments only\n",
        "| call | x86-64 | aarch64 | arguments |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| `{name}` | {_number(x86)} | {_number(arm)} | {words} |" for name, ((x86, arm), _, words) in CHECKED.items()
    ]
    lines += ["\n## Not there (ENOSYS)\n", "| call | x86-64 | aarch64 | why |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {_number(x86)} | {_number(arm)} | {why} |" for name, ((x86, arm), why) in ABSENT.items()]
    lines += ["\n## Refused (EPERM)\n", "| calls | what they could do |", "|---|---|"]
    lines += [f"| {', '.join(f'`{name}`' for name in names.split())} | {what} |" for what, names in REFUSED.items()]
    return "\n".join(lines) + "\n"


def _number(number: int | None) -> str:
    return "-" if number is None else str(number)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(document())
