"""Puts other prompts before the responses of a step, for passes in which a model knows more (``Pass.context``).

The response keeps its tokens; only what stands before it differs.  A context that leaves no room for the response is
not told: the pass then sees the prompt as it was drawn from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from mcore_rl.config.data import DataConfig
from mcore_rl.config.roles import RoleConfig
from mcore_rl.config.stages import Function, load_function
from mcore_rl.data.chat_template import rendered
from mcore_rl.data.packing import padded_length
from mcore_rl.episodes import Author, Episode, Segment
from mcore_rl.errors import ConfigError, Violation
from mcore_rl.parallel.context import padded_lengths, rows_multiple

if TYPE_CHECKING:
    from mcore_rl.config.run import RunConfig


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
    function, groups = load_function(context), defaultdict[int, list[Episode]](list)
    for episode in episodes:
        groups[episode.group].append(episode)
    budget, parallel = reader.microbatch_tokens or config.rollout.max_model_len, reader.parallel
    multiple = rows_multiple(parallel.cp, parallel.tp)
    behind, count = list[Episode](), 0
    for episode in episodes:
        try:
            messages = function(episode, groups[episode.group], config)
            prompt = None if messages is None else _tokens(messages, tokenizer, config.data)
        except Exception as error:
            problem = f"cannot say what the model is told of {episode.prompt_id}: {type(error).__name__}: {error}"
            raise ConfigError([Violation(function.__name__, "Pass.context", problem, "Mend the function")]) from error
        length = 0 if prompt is None else len(prompt) + episode.num_response_tokens
        rows = padded_length(sum(padded_lengths([length], parallel.cp)), multiple)
        if prompt is None or length > positions or rows > budget:
            behind.append(replace(episode, experts=None))
            continue
        count += 1
        segments = (Segment(author=Author.prompt, tokens=prompt), *episode.segments[1:])
        behind.append(replace(episode, segments=segments, experts=None))
    return Told(behind, count / max(1, len(behind)))


def _tokens(
    messages: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> NDArray[np.int32]:
    """The prompt that ``messages`` make, as the rows of the data become prompts."""
    text = rendered(tokenizer, messages, opens=True, kwargs=config.chat_template_kwargs)
    return np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
