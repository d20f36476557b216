"""What is put in quotes on the command line, and what hydra then reads: nothing else of a value changes."""

from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from mcore_rl.config.compose import keep_text


@pytest.mark.parametrize(
    ("override", "kept"),
    [
        ("a.b=1e3", "a.b='1e3'"),
        ("a.b=-1_000", "a.b='-1_000'"),
        ("+a.b=TRUE", "+a.b='TRUE'"),
        ("a.b=[1e3,x, .5 ,'7',null,[2]]", "a.b=['1e3',x, '.5' ,'7',null,['2']]"),
        ("a={b: 1e3, c: {d: 8:00, e: [5]}}", "a={b: '1e3', c: {d: 8:00, e: ['5']}}"),
        ("a={megatron: {b: 5, c: [1e3, {d: 2}]}, e: 5}", "a={megatron: {b: 5, c: [1e3, {d: 2}]}, e: '5'}"),
    ],
)  # fmt: skip
def test_numbers_and_booleans_are_quoted(override: str, kept: str) -> None:
    assert keep_text(override) == kept
    (parsed,) = OverridesParser.create().parse_overrides([kept])
    assert parsed.value() is not None


@pytest.mark.parametrize(
    "override",
    [
        "a.b=text", "a.b=null", "a.b='1e3'", 'a.b="x,5"', "a.b=['[5]',\"{c: 5}\"]", "a.b=8:00:00", "a.b=0x1F", "a.b=",
        "a.b=x\\,5", "a.b=${c.d}/5", "a.b=${oc.env:X,5}", "a.b=str(5)", "actor.megatron.a=5", "~a.b", "a.b",
        "++data.chat_template_kwargs={a: [1e3]}", "a.b=[8:30,x]",
    ],
)  # fmt: skip
def test_the_rest_is_handed_on_as_it_is(override: str) -> None:
    assert keep_text(override) == override
