"""An environment in which Python sees no more packages than a borrowed GPU machine has: all others cannot be imported.

``sitecustomize`` is loaded by every interpreter that is started with it, so processes of processes are bare too.  A
package is hidden from the finder itself: ``import`` fails, ``find_spec`` is None, and its metadata is not there either,
as where it is not installed.
"""

from __future__ import annotations

import os
import re
import sysconfig
from functools import cache
from importlib.metadata import distribution, distributions
from pathlib import Path

# What docs/gpu_facts.md names; what these declare, without their extras, comes with them.
KEPT = (
    "torch", "numpy", "megatron-core", "hydra-core", "omegaconf", "antlr4-python3-runtime", "psutil", "PyYAML",
    "msgspec", "transformers", "pytest", "pytest-timeout", "pytest-xdist",
)  # fmt: skip
# Ours, and what Python itself brings.  Apex and Transformer Engine are hidden wherever they are installed from.
NEVER_HIDDEN = {"mcore_rl", "benchmarks", "tests", "tools", "launch"}
ALWAYS_HIDDEN = {"transformer_engine", "transformer_engine_torch", "apex", "amp_C", "flash_attn", "vllm", "ray"}

SITECUSTOMIZE = """
from importlib.machinery import PathFinder
HIDDEN, KEPT = {hidden!r}, {kept!r}
find, find_distributions = PathFinder.find_spec.__func__, PathFinder.find_distributions
def find_spec(cls, name, path=None, target=None):
    return None if name.partition(".")[0] in HIDDEN else find(cls, name, path, target)
def kept_distributions(*arguments, **named):
    return [each for each in find_distributions(*arguments, **named) if each._normalized_name.replace("_", "-") in KEPT]
PathFinder.find_spec = classmethod(find_spec)
PathFinder.find_distributions = staticmethod(kept_distributions)
"""


def canonical(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


@cache
def kept() -> frozenset[str]:
    """Every package that is kept, or comes with one that is."""
    all_kept = set[str]()
    waiting = list(map(canonical, KEPT))
    while waiting:
        name = waiting.pop()
        if name in all_kept:
            continue
        all_kept.add(name)
        for requirement in distribution(name).requires or ():
            needed, _, marker = requirement.partition(";")
            if "extra" not in marker and (word := re.match(r"[\w.-]+", needed)) and installed(word[0]):
                waiting.append(canonical(word[0]))
    return frozenset(all_kept)


@cache
def hidden() -> frozenset[str]:
    """The top-level modules of every other installed package.

    Packages that another one carries inside itself, as setuptools does, are none: only one folder is looked into.
    """
    modules = set[str]()
    for package in distributions(path=[sysconfig.get_path("purelib")]):
        if canonical(package.name) not in kept():
            files = [file for file in package.files or () if file.suffix in (".py", ".so")]
            modules |= {file.parts[0].partition(".")[0] for file in files if file.parts[0] != ".."}
    return frozenset((modules | ALWAYS_HIDDEN) - NEVER_HIDDEN)


def installed(name: str) -> bool:
    return next(iter(distributions(name=name)), None) is not None


def environment(folder: Path) -> dict[str, str]:
    """This process's environment for a bare one, whose ``sitecustomize`` is written to ``folder``."""
    text = SITECUSTOMIZE.format(hidden=set(hidden()), kept=set(kept()))
    (folder / "sitecustomize.py").write_text(text, encoding="utf-8")
    paths = [str(folder), str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
