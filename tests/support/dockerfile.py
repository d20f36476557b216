"""A Dockerfile as its stages, and a build of one in a folder: without an engine, and without a root of its own."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

# Absolute paths of the images that a build here may write to.
OURS = re.compile(r"(?<![\w.])/(mcore_rl|asked|home/mcore_rl)\b")


@dataclass
class Stage:
    """A stage: its name or "", what it is from, and (instruction, its arguments) of each line after FROM."""

    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)


def stages(text: str) -> list[Stage]:
    """Of a Dockerfile, with continued lines joined and comments left out."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    stages: list[Stage] = []
    for line in filter(None, joined.splitlines()):
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            base, *name = re.split(r"\s+AS\s+", rest)
            stages.append(Stage("".join(name), base))
        elif stages:
            stages[-1].steps.append((instruction, rest.strip()))
    return stages


class BuildError(Exception):
    """A RUN line failed; the message is what it said."""


@dataclass
class Build:
    """Runs stages below ``root``: their absolute paths are there, and their programs are those of this machine.

    context: the folder that COPY copies from.  environment: of every RUN line, to which ARG and ENV add.
    """

    root: Path
    context: Path
    environment: dict[str, str]
    arguments: Mapping[str, str] = field(default_factory=dict)

    def run(self, stage: Stage) -> None:
        """All of its steps.  BuildError: a RUN line failed."""
        directory, variables = self.root, dict(self.environment)
        for instruction, rest in stage.steps:
            here = OURS.sub(lambda match: f"{self.root}{match[0]}", rest)
            if instruction == "WORKDIR":
                directory = Path(here)
                directory.mkdir(parents=True, exist_ok=True)
            elif instruction in ("ARG", "ENV"):
                for name, value in (word.partition("=")[::2] for word in shlex.split(here)):
                    chosen = self.arguments.get(name, value) if instruction == "ARG" else value
                    variables[name] = re.sub(r"\$\{(\w+)\}", lambda match: variables.get(match[1], ""), chosen)
            elif instruction == "COPY":
                self._copy(here.split(), directory)
            elif instruction == "RUN":
                done = subprocess.run(
                    ["sh", "-c", here], cwd=directory, env=variables, capture_output=True, text=True, check=False
                )
                if done.returncode:
                    raise BuildError(f"{rest}:\n{done.stdout}{done.stderr}")
        self.environment = variables

    def _copy(self, words: list[str], directory: Path) -> None:
        # What is copied from another stage stands at its absolute path, which is below root already.
        source = Path("/") if words[0].startswith("--from=") else self.context
        *names, target = [word for word in words if not word.startswith("--")]
        into = directory / target
        for name in names:
            there = source / name
            if there.is_dir():
                shutil.copytree(there, into, dirs_exist_ok=True)
            else:
                into.mkdir(parents=True, exist_ok=True)
                shutil.copy(there, into / there.name)
