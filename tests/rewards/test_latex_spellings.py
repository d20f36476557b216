"""The table of spellings: each row does what its example says, and the table leaves what it has made alone."""

from __future__ import annotations

import time

import pytest

from mcore_rl.rewards.latex_spellings import SPELLINGS, Spelling, canonical
from tests.support.math_corpus import golds


@pytest.mark.parametrize("spelling", SPELLINGS, ids=[spelling.reason for spelling in SPELLINGS])
def test_the_example_of_a_row(spelling: Spelling) -> None:
    before, after = spelling.example
    assert before != after
    assert spelling.apply(before) == after


@pytest.mark.parametrize(
    ("text", "one"),
    [
        (r"\dfrac12", r"\frac{1}{2}"),
        (r"\frac {1} 2", r"\frac{1}{2}"),
        (r"\left( 3,\, \tfrac{\pi}{2} \right)", r"( 3, \frac{\pi}{2} )"),
        (r"90^{\circ}.", r"90^\circ"),
        (r"12,\!000", "12,000"),
        (r"10{,}000", "10,000"),
        (r"$\mathbf{42}$;", "42"),
        (r"6-5\mathrm{i}", "6-5i"),
        (r"5\ \mathrm{cm}", r"5 \text{cm}"),
        (r"\begin{bmatrix} 1 \\ 2 \end{bmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
        (r"(-\infty, +\infty)", r"(-\infty, \infty)"),
        ("x + \\infty", "x + \\infty"),
        ("2\N{MINUS SIGN}\N{SQUARE ROOT}5", r"2-\sqrt{5}"),
        (r"x\leq\sqrt2", r"x\le \sqrt{2}"),
        (r"f(x)=\sin ^2x", r"f(x)=\sin^{2}x"),
        (r"\text{(C)}\ 5", r"\text{(C)} 5"),
    ],
)
def test_one_spelling(text: str, one: str) -> None:
    assert canonical(text) == one


def test_the_one_spelling_is_left_alone() -> None:
    for _, gold in golds(3):
        assert canonical(canonical(gold)) == canonical(gold)


@pytest.mark.parametrize(
    "piece", ["{", "}", "\\frac", "\\frac{", "\\left(", "**", "\\text{", "$", " ", "1,", "^\\circ", "\\("]
)
def test_hostile_text_ends(piece: str) -> None:
    started = time.process_time()
    canonical(piece * (4000 // len(piece)))
    assert time.process_time() - started < 20  # 0.1 s are needed; exponential takes longer than anybody waits
