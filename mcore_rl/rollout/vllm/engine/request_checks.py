"""Refuses prompts and sampling parameters that an engine cannot run, before anything is sent to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mcore_rl.config.model import ModelConfig, VisionConfig
from mcore_rl.config.rollout import RolloutConfig, ServingConfig
from mcore_rl.data.media.pixels import CHANNELS
from mcore_rl.data.media.placed import misplaced
from mcore_rl.ground.errors import RolloutError
from mcore_rl.rollout.protocol import Prompt, Request, Sampling
from mcore_rl.rollout.vllm.engine.environment import has_tokenizer

MAX_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of an engine's requests.

    name: the engine's.  max_prompt_length, max_response_length: tokens.  vocab_size: of its model.  has_tokenizer:
    whether it can find stop strings.  tower: what its model sees pictures with; None: it reads text.
    """

    name: str
    max_prompt_length: int
    max_response_length: int
    vocab_size: int
    has_tokenizer: bool
    tower: VisionConfig | None = None

    @property
    def max_model_len(self) -> int:
        """The most tokens of an episode: prompt and response together."""
        return self.max_prompt_length + self.max_response_length


def limits_of(name: str, directory: Path, config: ServingConfig, model: ModelConfig) -> Limits:
    """The limits of engine ``name``; a classifier's limits leave no room for responses."""
    lengths = (config.max_model_len, 0)
    if isinstance(config, RolloutConfig):
        lengths = (config.max_prompt_length, config.max_response_length)
    return Limits(
        name=name,
        max_prompt_length=lengths[0],
        max_response_length=lengths[1],
        vocab_size=model.vocab_size,
        has_tokenizer=has_tokenizer(directory),
        tower=model.vision,
    )


def demand_requests(requests: Sequence[Request], sampling: Sampling, limits: Limits) -> None:
    """Raises RolloutError with every prompt and parameter that the engine cannot run."""
    problems = _sampling_problems(sampling, limits)
    seen: set[tuple[str, int]] = set()
    for request in requests:
        if request.key in seen:
            problems.append(f"prompt {request.prompt.id} is asked for sample {request.index} twice. Give it another id")
        seen.add(request.key)
        problem = _prompt_problem(request, sampling, limits)
        if problem:
            problems.append(f"prompt {request.prompt.id} {problem}")
    problems = list(dict.fromkeys(problems))  # all samples of a prompt have the same problems
    if problems:
        more = [f"and {len(problems) - MAX_SHOWN} more"] if len(problems) > MAX_SHOWN else []
        raise RolloutError("\n  - ".join([f"{limits.name} cannot generate:", *problems[:MAX_SHOWN], *more]))


def _picture_problem(prompt: Prompt, tower: VisionConfig | None) -> str | None:
    """What is wrong with the prompt's pictures: those who made it are to blame, and vLLM would end the engine."""
    if not prompt.pictures:
        return None
    if tower is None:
        return "has pictures, and the engine's model reads text. Start it with pictures=True"
    width = CHANNELS * tower.temporal_patch_size * tower.patch_size**2
    for place, picture in enumerate(prompt.pictures):
        patches = picture.read()
        grid = picture.placed.grid
        if patches.shape != (grid.patches, width) or patches.dtype != np.uint8 or grid.merge != tower.merge_size:
            has = f"{patches.dtype} of {patches.shape} for {grid}"
            remedy = "Make them by mcore_rl.data.media.pixels, with the sizes of its tower"
            return f"has picture {place} as {has}, and the model takes uint8 of {width} a patch. {remedy}"
    problem = misplaced([each.placed for each in prompt.pictures], np.asarray(prompt.tokens, dtype=np.int32))
    return None if problem is None else f"has pictures where they cannot be: {problem}. Place them anew"


def _sampling_problems(sampling: Sampling, limits: Limits) -> list[str]:
    problems = []
    if not 1 <= sampling.max_tokens <= limits.max_response_length:
        allowed = f"between 1 and rollout.max_response_length={limits.max_response_length}"
        problems.append(f"max_tokens={sampling.max_tokens} must lie {allowed}")
    if sampling.stop and not limits.has_tokenizer:
        problems.append("there is no tokenizer to find stop strings with. Give stop_token_ids, or a tokenizer")
    return problems


def _prompt_problem(request: Request, sampling: Sampling, limits: Limits) -> str | None:
    tokens = request.prompt.tokens
    if not tokens:
        return "is empty. Drop it from the data, or let the chat template begin with a token"
    if len(tokens) + sampling.max_tokens > limits.max_model_len:  # the prompt of a later turn is the dialogue so far
        room = f"rollout.max_prompt_length={limits.max_prompt_length} and max_response_length have room for"
        problem = (
            f"has {len(tokens)} tokens, with max_tokens={sampling.max_tokens} more than the {limits.max_model_len}"
        )
        return f"{problem} that {room}. Filter or cut long prompts, or raise them"
    if not (0 <= min(tokens) and max(tokens) < limits.vocab_size):
        wrong = next(token for token in tokens if not 0 <= token < limits.vocab_size)
        problem = f"has token {wrong}, and the model's vocabulary has {limits.vocab_size}"
        return f"{problem}. Encode it with the tokenizer of this model"
    if wrong_picture := _picture_problem(request.prompt, limits.tower):
        return wrong_picture
    if request.num_done >= sampling.max_tokens:
        return f"goes on from {request.num_done} tokens, and max_tokens={sampling.max_tokens} leaves none. Raise it"
    return None
