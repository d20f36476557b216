"""What lies across the border where a response goes on from a part of it: a stop string, or the bytes of a character.

vLLM takes the part for a prompt, so that its detokenizer finds no stop string that begins in it, and reads no character
of which it has the first bytes.  Both are mended here once the response is there: the tokens after such a stop string
were drawn in vain, and are cut.  What is left is as if the response had never been interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from mcore_rl.rollout.episodes import FinishReason, VersionSpan
from mcore_rl.rollout.protocol import Request, Sample

CONTEXT = 8  # tokens of the prompt by which a tokenizer knows whether a response begins with a space
UNREADABLE = "\ufffd"  # for bytes that are no character yet
Decode = Callable[[Sequence[int]], str]


def mended(request: Request, sample: Sample, stop: Sequence[str], decode: Decode) -> Sample:
    """``sample``, the answer to ``request``, with what its border with ``request.so_far`` hid from vLLM.

    stop: as in ``Sampling``.  decode: tokens to text, without special tokens.
    """
    if not request.num_done:
        return sample
    context = list(request.prompt.tokens[-CONTEXT:])
    tokens = sample.tokens.tolist()
    skipped = len(decode(context))

    def text(count: int) -> str:
        return decode(context + tokens[:count])[skipped:]

    before = text(request.num_done)
    border = len(before.rstrip(UNREADABLE))
    longest = max(map(len, stop), default=0)
    for count in range(request.num_done + 1, len(tokens) + 1 if longest else 0):
        now = text(count)
        if (ends := _first(now, border, stop)) is not None:
            place, string = ends
            if place >= border and not before.endswith(UNREADABLE):
                return sample  # vLLM found it, too
            return _cut(request, sample, count, now[:place], string)
        if len(now) > border + longest:
            break
    if not before.endswith(UNREADABLE):
        return sample
    whole = text(len(tokens))
    if isinstance(sample.stop, str):
        whole = whole[: whole.rfind(sample.stop)]
    return replace(sample, text=whole)


def _first(text: str, border: int, stop: Sequence[str]) -> tuple[int, str] | None:
    """(place, string) of the stop string beyond or across ``border`` that ends first, of ties the first of ``stop``."""
    places = [(text.find(each, max(0, border - len(each) + 1)), each) for each in stop]
    there = [(place, each) for place, each in places if place >= 0]
    return min(there, key=lambda each: each[0] + len(each[1]), default=None)


def _cut(request: Request, sample: Sample, count: int, text: str, stop: str) -> Sample:
    """The first ``count`` tokens of ``sample``, which ``stop`` ended."""
    spans = [each for each in sample.versions if each.start < count]
    return replace(
        sample,
        tokens=sample.tokens[:count],
        logprobs=sample.logprobs[:count],
        versions=tuple(VersionSpan(version=s.version, start=s.start, end=min(s.end, count)) for s in spans),
        finish=FinishReason.stop,
        stop=stop,
        text=text,
        experts=None if sample.experts is None else sample.experts[: len(request.prompt.tokens) + count - 1],
    )
