"""Puts other prompts before the responses of a step, for passes in which a model knows more (``Pass.context``).

The response keeps its tokens; only what stands before it differs.  A context that leaves no room for the response is
not told: the pass then sees the prompt as it was drawn from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from mcore_rl.config.roles import RoleConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.config.stages import Function, load_function
from mcore_rl.data.chat_template import rendered
from mcore_rl.ground.errors import ConfigError, Violation
from mcore_rl.parallel.context import padded_rows
from mcore_rl.rollout.episodes import Author, Episode, Segment


@dataclass(frozen=True)
class Told:
    """Episodes behind other prompts, in the given order.  share: of those whose prompt is another, 0 to 1."""

    episodes: list[Episode]
    share: float


def told(
    episodes: Sequence[Episode],
    context: Function,
    tokenizer: PreTrainedTokenizerBase,
    config: RunConfig,
    reader: RoleConfig,
    positions: int,
) -> Told:
    """``episodes`` behind what ``context`` says of each (``Pass.context``).

    reader: the configuration of the role that computes it.  positions: the most tokens that its model reads.
    Raises ConfigError, with the prompt's name, if ``context`` fails or the chat template refuses what it says.
    """
    function = load_function(context)
    groups = defaultdict[int, list[Episode]](list)
    for episode in episodes:
        groups[episode.group].append(episode)
    texts = [_text(function, episode, groups[episode.group], tokenizer, config) for episode in episodes]
    prompts = _prompts([text for text in texts if text is not None], tokenizer)
    budget = reader.microbatch_tokens or config.rollout.max_model_len
    parallel = reader.parallel
    behind = list[Episode]()
    count = 0
    for episode, text in zip(episodes, texts, strict=True):
        segments = episode.segments
        if text is not None:
            length = len(prompts[text]) + episode.num_response_tokens
            if length <= positions and padded_rows([length], parallel.cp, parallel.tp) <= budget:
                segments = (Segment(author=Author.prompt, tokens=prompts[text]), *segments[1:])
                count += 1
        behind.append(replace(episode, segments=segments, experts=None))
    return Told(behind, count / max(1, len(behind)))


def _text(
    function: Callable[..., Any],
    episode: Episode,
    group: Sequence[Episode],
    tokenizer: PreTrainedTokenizerBase,
    config: RunConfig,
) -> str | None:
    """What the model is told of ``episode``, as text; None: its prompt."""
    try:
        messages = function(episode, group, config)
        if messages is None:
            return None
        return rendered(tokenizer, messages, opens=True, kwargs=config.data.chat_template_kwargs)
    except Exception as error:
        problem = f"cannot say what the model is told of {episode.prompt_id}: {type(error).__name__}: {error}"
        raise ConfigError([Violation(function.__name__, "Pass.context", problem, "Mend the function")]) from error


def _prompts(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> dict[str, NDArray[np.int32]]:
    """The tokens of each text, which samples of a prompt often share, once."""
    different = list(dict.fromkeys(texts))
    if not different:
        return {}
    encoded = tokenizer(different, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    return {text: np.asarray(tokens, dtype=np.int32) for text, tokens in zip(different, encoded, strict=True)}
