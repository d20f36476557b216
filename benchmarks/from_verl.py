"""How much of verl's own scripts ``mcore-rl from-verl`` translates, over a checkout of verl.

python benchmarks/from_verl.py CHECKOUT            # a table by exit code, and what is not here, most frequent first
python benchmarks/from_verl.py CHECKOUT --each     # one line a script besides

A script counts if it starts a program of verl's and asks for Megatron, or for vLLM (verl's default).  Scripts
that ask for arguments get ``ARGUMENTS``.  Exit code 0: our run does all that it asks for.  1: a part is not here, and
said; each such part is counted by its key and reason.  2: refused.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from mcore_rl.cli import main as command
from mcore_rl.from_verl.shell import expand
from mcore_rl.from_verl.written import launch_of
from mcore_rl.ground.secrets import without_secrets

ARGUMENTS = ("8", "checkpoints")
ELSEWHERE = ("sglang", "trtllm", "_npu", "ascend", "veomni", "torchtitan", "automodel", "megatron_lite", "mlite")


@dataclass
class Measured:
    """What came of a script.  lost: the keys that are not here or were not understood, each with its reason."""

    path: str
    code: int
    log: str
    model: str = ""
    sees: bool = False
    words: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    @property
    def names_another_model(self) -> bool:
        """Whether the yaml has a model that no word of the script names."""
        return bool(self.model) and not any(self.model in word for word in self.words)


def measured(checkout: Path, script: Path) -> Measured | None:
    """What came of ``script``; None if it starts nothing of verl's."""
    path = str(script.relative_to(checkout))
    text = script.read_text(encoding="utf-8")
    launches = []
    for words in ((), ARGUMENTS):
        programs = expand(text, script, words, environment=without_secrets()).programs
        launches = [launch for each in programs if (launch := launch_of(each))]
        if launches:
            break
    else:
        return None
    log = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(log), contextlib.redirect_stdout(log):
        out = Path(folder) / "made.yaml"
        code = command(["from-verl", str(script), *words, "--out", str(out)])
        made = yaml.safe_load(out.read_text()) if out.exists() else {}
    model = str((made.get("model") or {}).get("path") or "")
    sees = "image_key" in (made.get("data") or {})
    outcome = Measured(path, code, log.getvalue(), model, sees, launches[0].words)
    for heading in ("Not here, and left out", "Not understood, and left out", "Refused by ours"):
        section = re.search(rf"^{heading}:\n((?:  .*\n?)+)", outcome.log, re.M)
        outcome.lost += [line.strip() for line in section[1].splitlines()] if section else []
    return outcome


def is_ours(each: Measured) -> bool:
    """Whether it is Megatron's or vLLM's, on NVIDIA's or AMD's devices."""
    elsewhere = any(word in each.path.lower() for word in ELSEWHERE) or any(
        re.search(r"rollout\.name=(?!vllm)|trainer\.device=npu|model_engine=(?!megatron|dp|fsdp)", word)
        for word in each.words
    )
    return not elsewhere


def main() -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a folder of verl's files")
    parser.add_argument("--each", action="store_true", help="show each script")
    options = parser.parse_args()
    outcomes = [each for path in sorted(options.checkout.rglob("*.sh")) if (each := measured(options.checkout, path))]
    ours = [each for each in outcomes if is_ours(each)]
    seeing = [each for each in ours if each.sees]
    for each in outcomes if options.each else ():
        print(each.code, "" if each in ours else "elsewhere", each.path, *each.lost[:6], sep="\t")
        if each.code == 2:
            print("\t", each.log.strip()[:300])
    kinds = {"all": outcomes, "Megatron's or vLLM's": ours, "those of them with pictures": seeing}
    for name, some in kinds.items():
        codes = Counter(each.code for each in some)
        print(f"{name}: {len(some)} scripts,", ", ".join(f"{codes[code]} exit {code}" for code in sorted(codes)))
    print("yamls with a model that the script does not name:", sum(each.names_another_model for each in outcomes))
    reasons = Counter(line for each in ours if each.code for line in each.lost)
    for line, count in reasons.most_common(60):
        print(f"{count:4}  {line[:200]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
