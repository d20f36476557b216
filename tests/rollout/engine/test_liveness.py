"""What is said of an exception of vLLM's."""

from __future__ import annotations

import itertools

import pytest

from mcore_rl.rollout.engine.liveness import words


class EngineGenerateError(Exception):
    """As vLLM's: without words."""


def raised(*errors: Exception) -> Exception:
    """The last of ``errors``, each the cause of the next."""
    for cause, error in itertools.pairwise(errors):
        error.__cause__ = cause
    return errors[-1]


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        ([ValueError("half a character"), EngineGenerateError()], "ValueError: half a character"),
        (
            [ValueError("half a character"), EngineGenerateError(), EngineGenerateError()],
            "ValueError: half a character",
        ),
        ([ValueError("cause"), EngineGenerateError("own words")], "EngineGenerateError: own words"),
        ([EngineGenerateError()], "EngineGenerateError: "),
    ],
)
def test_an_error_without_words_is_told_by_its_cause(errors: list[Exception], said: str) -> None:
    assert words(raised(*errors)) == said
