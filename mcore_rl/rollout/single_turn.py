"""Makes an episode of two segments from one prompt and one answer, and a segment of what was drawn."""

from __future__ import annotations

from mcore_rl.data.prompts import PromptRow
from mcore_rl.ground.arrays import RoutesArray
from mcore_rl.rollout.episodes import Author, Episode, Segment
from mcore_rl.rollout.protocol import Sample


def single_turn(
    row: PromptRow, prompt: Segment, sample: Sample, group: int, experts: RoutesArray | None = None
) -> Episode:
    """The episode of ``sample``, an answer to ``row``, without scores.

    prompt: ``prompt_segment(row)``, which all samples of the prompt share.  group, experts: see ``Episode``.
    """
    return Episode(
        row=row,
        prompt_id=sample.prompt_id,
        group=group,
        index=sample.index,
        segments=(prompt, drawn_segment(sample)),
        end=sample.finish,
        experts=experts,
    )


def drawn_segment(sample: Sample) -> Segment:
    """What the model drew, as a segment that is trained."""
    return Segment(
        author=Author.model,
        tokens=sample.tokens,
        trained=True,
        logprobs=sample.logprobs,
        versions=sample.versions,
        text=sample.text,
    )
