"""Which program of verl's a command starts, and which of ours stands for it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

SYNC, ASYNC, ONE_STEP_OFF = "sync", "async", "one_step_off"
PROGRAMS = {  # the last name of verl's module -> our program
    "main_ppo": "train",
    "main_ppo_v0": "train",
    "main_ppo_sync": "train",
    "main_dapo": "train",
    "main_spin": "train",
    "fully_async_main": "train",
    "sft_trainer": "sft",
    "sft_trainer_ray": "sft",
    "fsdp_sft_trainer": "sft",
    "main_generation": "generate",
    "main_generation_server": "generate",
    "main_eval": "evaluate",
}
ELSEWHERE = {  # what is no run: verl's module -> what to do
    "model_merger": "mcore-rl convert writes Hugging Face checkpoints of our runs; verl's own are merged with verl",
    "main_prime": "write algorithm=prime (docs/algorithms.md), with the keys of the script",
    "main_sppo": "write algorithm=sppo (docs/algorithms.md), with the keys of the script",
}
MODULE = re.compile(r"(?:verl|recipe)(?:\.\w+)+")
FILE = re.compile(r"(?:.*/)?((?:fully_async_)?main(?:_\w+)?|\w*sft_trainer\w*)\.py")


@dataclass(frozen=True)
class Launch:
    """A program of verl's that is started.

    module: its name; "": words alone.  words: its arguments.  nodes, devices: of torchrun's, which decides them.
    """

    module: str
    words: list[str] = field(default_factory=list)
    nodes: str = ""
    devices: str = ""

    @property
    def program(self) -> str:
        """Ours that stands for it; "" if none does."""
        return PROGRAMS.get(self.module.rpartition(".")[2], "") if self.module else "train"

    @property
    def mode(self) -> str:
        """Whether sampling and training take turns."""
        if "fully_async" in self.module:
            return ASYNC
        return ONE_STEP_OFF if "one_step_off" in self.module else SYNC

    @property
    def remedy(self) -> str:
        """What to do where no program of ours stands for it."""
        known = next((each for name, each in ELSEWHERE.items() if name in self.module.split(".")), "")
        return known or f"Read are {', '.join(PROGRAMS)}"


def launch_of(words: Sequence[str]) -> Launch | None:
    """The program of verl's that a command starts, whatever starts it: ray, torchrun, srun, a container; or None."""
    for place, word in enumerate(words):
        before = words[place - 1] if place else ""
        file = FILE.fullmatch(word)
        if (before == "-m" and MODULE.fullmatch(word)) or (file and file[1] != "main"):
            folders = word.removesuffix(".py").replace("/", ".") if file else word
            given = [each for each in words[place + 1 :] if each != "&"]
            return Launch(folders, given, _option(words[:place], "nnodes"), _option(words[:place], "nproc_per_node"))
    return None


def _option(words: Sequence[str], name: str) -> str:
    """The value of an option of torchrun's; "" if it is none or no number."""
    names = (f"--{name}", f"--{name.replace('_', '-')}")
    for place, word in enumerate(words):
        option, given, value = word.partition("=")
        if option in names:
            value = value if given else next(iter(words[place + 1 : place + 2]), "")
            return value if value.isdigit() else ""
    return ""
