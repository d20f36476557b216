"""Settings of low-rank adapters (LoRA, arXiv:2106.09685), with PEFT's names and meanings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from mcore_rl.config.bounds import InputDirectory, NonNegativeFloat, NonNegativeInt, PositiveFloat
from mcore_rl.config.role import Moves, Never
from mcore_rl.ground.errors import Violation

ALL_LINEAR = "all-linear"


class AdapterInit(Enum):
    """First values of A; B is 0, so that a new adapter changes nothing.

    ``kaiming``: uniform within 1 / sqrt(inputs).  ``gaussian``: normal of standard deviation 1 / rank.
    """

    kaiming = "kaiming"
    gaussian = "gaussian"


class PublishedLora(Enum):
    """What the rollout engines hold of a model with adapters.

    ``auto``: ``adapter`` where vLLM applies the adapters, else ``merged``.
    ``merged``: weights ``W + scale * B A``, rounded to the engines' dtype: an update sends the whole model.
    ``adapter``: the base, which is sent once, and the adapters, which vLLM applies itself: an update sends these alone.
    """

    auto = "auto"
    merged = "merged"
    adapter = "adapter"


# The sizes of vLLM's memory for adapters (MaxLoRARanks in vllm/config/lora.py, 0.32).
ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
ACTOR_ADAPTER = 1  # the id of the actor's adapters in engines; 0 is the base


@dataclass(frozen=True, kw_only=True)
class EngineAdapters:
    """The memory for adapters that an engine must have.

    rank: of the adapters.  modules: the ends of the names of vLLM's linear layers that have some.  ids: of the adapters
    that are in memory at once.
    """

    rank: int
    modules: tuple[str, ...]
    ids: tuple[int, ...] = (ACTOR_ADAPTER,)

    @property
    def held_rank(self) -> int:
        """The rank that vLLM takes memory for."""
        return next(rank for rank in ENGINE_RANKS if rank >= self.rank)


@dataclass(kw_only=True)
class LoraConfig:
    """Train adapters instead of the weights: each adapted layer computes ``W x + scale * B (A x)``.

    rank: rows of A and columns of B; 0 trains the weights themselves.
    alpha: the scale is alpha / rank.
    use_rslora: the scale is alpha / sqrt(rank) (arXiv:2312.03732).
    target_modules: names of the adapted layers in the Hugging Face model, or the ends of them; ``[all-linear]`` adapts
    every linear layer of attention, MLPs and experts, and neither routers nor the output projection; this may be named.
    exclude_modules: names, or the ends of them, of layers that are left out.
    init: see ``AdapterInit``.
    dropout: 0; of PEFT's adapters, the share of inputs that they leave out in training, which is refused here: updates
    would be of another policy than the one that sampled.
    path: a directory that PEFT saved, whose adapters are the first values; None: new ones.
    """

    rank: NonNegativeInt = 0
    alpha: PositiveFloat = 16.0
    use_rslora: bool = False
    target_modules: list[str] = field(default_factory=lambda: [ALL_LINEAR])
    exclude_modules: list[str] = field(default_factory=list)
    init: AdapterInit = AdapterInit.kaiming
    dropout: NonNegativeFloat = 0.0
    path: InputDirectory | None = None

    @property
    def scale(self) -> float:
        """The factor of ``B A``."""
        assert self.rank, "there are no adapters"
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)


def is_the_base(lora: LoraConfig | None, moves: Moves) -> bool:
    """Whether frozen copies of the first weights are the base: adapters are new, add nothing, and copies never move."""
    return lora is not None and lora.path is None and isinstance(moves, Never)


def lora_violations(lora: LoraConfig, prefix: str) -> Iterator[Violation]:
    """Contradictions within ``lora``.  prefix: of its keys, with its dot."""
    if lora.dropout:
        problem = "leaves inputs out in training, so that updates are of another policy than the one that sampled"
        yield Violation(f"{prefix}dropout", lora.dropout, problem, "Write 0, as PEFT's default is")
    if not lora.target_modules:
        yield Violation(f"{prefix}target_modules", [], "adapts no layer", f"Write [{ALL_LINEAR}], or rank=0 for none")
    if ALL_LINEAR in lora.target_modules and len(lora.target_modules) > 1:
        problem = f"names layers beside {ALL_LINEAR}, which is all of them"
        yield Violation(f"{prefix}target_modules", lora.target_modules, problem, f"Write [{ALL_LINEAR}], or the names")
