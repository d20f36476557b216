"""A response that goes on from a part is as one that was never interrupted, which is drawn here whole."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from mcore_rl.rollout.episodes import FinishReason, VersionSpan
from mcore_rl.rollout.protocol import Prompt, Request, Sample
from mcore_rl.rollout.vllm.engine.borders import mended

# Of bytes: a token is one, so that characters and stop strings are cut wherever a response is.
PROMPT = Prompt(id="p", tokens=tuple(b"What? "))


def decode(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode("utf-8", errors="replace")


def sample(tokens: Sequence[int], text: str, finish: FinishReason, stop: str | None, *, part: int = 0) -> Sample:
    """part: tokens of version 1; the others are of version 2."""
    spans = [(1, 0, min(part, len(tokens))), (2, part, len(tokens))]
    return Sample(
        prompt_id="p",
        index=0,
        tokens=np.array([*tokens], dtype=np.int32),
        logprobs=np.arange(len(tokens), dtype=np.float32),
        versions=tuple(VersionSpan(version=v, start=a, end=b) for v, a, b in spans if b > a),
        finish=finish,
        stop=stop,
        text=text,
        experts=np.arange(len(PROMPT.tokens) + len(tokens) - 1, dtype=np.uint8).reshape(-1, 1, 1),
    )


def drawn(model: bytes, begin: int, stop: Sequence[str]) -> tuple[int, str, str | None]:
    """(tokens, text, stop string) of vLLM's answer from byte ``begin`` on; it looks for stop strings after each."""
    for count in range(begin + 1, len(model) + 1):
        text = decode(model[begin:count])
        ends = [(text.find(each) + len(each), text.find(each), each) for each in stop if each in text]
        if ends and not text.endswith("\ufffd"):
            _, place, string = min(ends, key=lambda each: each[0])  # of ties the first, as vLLM has it
            return count, text[:place], string
    return len(model), decode(model[begin:]).replace("\ufffd", ""), None


@pytest.mark.parametrize("stop", [(), ("</end>",), ("</end>", "end"), ("é</",), ("€",), ("zzz",)])
def test_it_is_the_response_that_was_never_interrupted(stop: tuple[str, ...]) -> None:
    model = "2 + 2 € = 4 é</end> and more </end>".encode()
    count, text, string = drawn(model, 0, stop)
    for cut in range(1, count):
        before = decode(model[:cut]).removesuffix("\ufffd")
        so_far = sample(model[:cut], before, FinishReason.abort, None, part=cut)
        end, rest, ended = drawn(model, cut, stop)
        finish = FinishReason.length if ended is None else FinishReason.stop
        answer = sample(model[:end], before + rest, finish, ended, part=cut)
        whole = mended(Request(prompt=PROMPT, so_far=so_far), answer, stop, decode)
        assert whole.tokens.tolist() == list(model[:count]), cut
        assert (whole.text, whole.stop) == (text, string), cut
        assert whole.finish is (FinishReason.length if string is None else FinishReason.stop)
        assert whole.logprobs.tolist() == [*range(count)] and whole.versions[-1].end == count
        assert whole.versions[0] == VersionSpan(version=1, start=0, end=cut)
        assert whole.experts is not None and len(whole.experts) == len(PROMPT.tokens) + count - 1


def test_of_several_the_one_that_ends_first_ends_it() -> None:
    draw = random.Random(0)
    for _ in range(300):
        model = bytes(draw.choice(b"ab") for _ in range(12))
        stop = tuple({"".join(draw.choice("ab") for _ in range(draw.randint(2, 5))) for _ in range(2)})
        count, text, string = drawn(model, 0, stop)
        for cut in range(1, count):
            end, rest, ended = drawn(model, cut, stop)
            so_far = sample(model[:cut], decode(model[:cut]), FinishReason.abort, None, part=cut)
            finish = FinishReason.length if ended is None else FinishReason.stop
            answer = sample(model[:end], decode(model[:cut]) + rest, finish, ended, part=cut)
            whole = mended(Request(prompt=PROMPT, so_far=so_far), answer, stop, decode)
            assert (len(whole.tokens), whole.text) == (count, text), (model, stop, cut)
            assert whole.stop == string


def test_what_begins_afresh_is_left_as_it_is() -> None:
    answer = sample(b"all of it", "all of it", FinishReason.stop, None)
    assert mended(Request(prompt=PROMPT), answer, ("of",), decode) is answer
