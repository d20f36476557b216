"""Answers without a box: what a reader takes a text to say, written by hand."""

from __future__ import annotations

import time

import pytest

from mcore_rl.config.reward import RewardConfig
from mcore_rl.rewards.math import answer_of, grade_math
from mcore_rl.rewards.math_statement import stated
from mcore_rl.rewards.score import RewardRequest


def is_right(response: str, ground_truth: str) -> bool:
    return grade_math(RewardRequest(("p", 0), "math", response, ground_truth), RewardConfig()).value == 1.0


@pytest.mark.parametrize(
    ("response", "ground_truth"),
    [
        ("The final answer is **650**.", "650"),
        ("The final answer is *650*.", "650"),
        ("The final answer is ***650***.", "650"),
        ("The final answer is __650__.", "650"),
        ("The final answer is `650`.", "650"),
        ("<b>The answer is 650</b>", "650"),
        ("So the result is **650**", "650"),
        ("**Answer:**\n\n$$7$$", "7"),
        ("### Final Answer\n\n7", "7"),
        ("<think>12</think><answer>7</answer>", "7"),
        ("Therefore, the answer is \\( x = 7 \\).", "7"),
        ("The answer is $7$ meters.", r"7 \text{ m}"),
        ("The answer is (A).", "A"),
        ("The answer is (A).", r"\text{(A)}"),
        ("Answer: C) 7", "7"),
        ("The answers are 3 and 5.", "3, 5"),
        ("The answer is x = 3 and y = 5.", "x = 3, y = 5"),
        ("The answer is 65,960 apples.", "65960"),
        ("The cost is $5 and then $10. The answer is $15.", "15"),
        ("The answer is $5+3=8$.", "8"),
        ("The answer is 5 + 3 = 8.", "8"),
        ("This gives us $3 \\cdot 4 = 12$.", "12"),
        ("Hence we find $2x = 12$.", "2x=12"),
        ("The answer is $2x+y+1=0$.", "2x+y+1=0"),
        ("So 2**3 = 8. The answer is 8", "8"),
        ("The answer is 3*4*5.", "60"),
        ("The answer is x_1 * y_1.", "x_1 y_1"),
        (r"The answer is \textcolor{red}{\frac{\sqrt{3}}{2}}.", r"\frac{\sqrt3}{2}"),
        ("The answer is 5, not 6.", "5"),
        ("The answer is 5. I hope this answer is correct.", "5"),
        ("The answer is not obvious. We get x = 5.", "5"),
        ("Hence we find $h = 1-5\\mathrm{i}$.", "1-5i"),
        ("The answer is 5, which is not 6.", "5"),
        ("The answer is 650 since x isn't negative.", "650"),
        ("The answer is (B), since (A) isn't right.", "B"),
        ("The answer is option **(C)**.", "C"),
        ("The correct answer is choice D.", "D"),
        ("The answer is \u201c650\u201d.", "650"),
    ],
)
def test_what_is_stated_is_right(response: str, ground_truth: str) -> None:
    assert is_right(response, ground_truth), answer_of(response)


@pytest.mark.parametrize(
    ("response", "ground_truth"),
    [
        ("The answer is not 5.", "5"),
        ("The answer isn't $5$.", "5"),
        ("5 is not the answer.", "5"),
        ("The answer cannot be 5.", "5"),
        ("The answer is definitely not 5.", "5"),
        ("The answer is never 5.", "5"),
        ("The answer is anything but 5.", "5"),
        ("The answer can't be 5.", "5"),
        ("The answer won't be 5.", "5"),
        ("The answer will not be 5.", "5"),
        ("The answer to question 3 is not 5.", "5"),
        ("The answer, however, is not 5.", "5"),
        ("5 can't be the answer.", "5"),
        ("5 is clearly not the answer.", "5"),
        ("The answer is no more than 5.", "5"),
        ("The answer is 5, not 6.", "6"),
        ("The answer is 5 or 6.", "5"),
        ("The answer is $5$ or $6$.", "6"),
        (r"The answer is $\hbar\omega$ or $9$.", r"\hbar\omega"),
        ("The answer is at least 5.", "5"),
        ("The answer is between 4 and 6.", "6"),
        ("The answer is **5** million.", "5"),
        ("The answer is 7 meters.", r"7 \text{ cm}"),
        ("First 5. The answer is **6**.", "5"),
        ("The answer is 5. Wait, no. The answer is 6.", "5"),
        ("The answer is (B), so not (A).", "A"),
        ("The answer is (A) or (B).", "A"),
        ("The answer is 15 dollars and 20 cents.", "15"),
    ],
)
def test_what_is_not_stated_is_wrong(response: str, ground_truth: str) -> None:
    assert not is_right(response, ground_truth), answer_of(response)


@pytest.mark.parametrize(
    "piece", ["$", "**", "_", "*", "`", "the answer is ", "<answer>", "$a$,", "isn't the answer", "\\["]
)
def test_hostile_text_ends(piece: str) -> None:
    started = time.process_time()
    stated(piece * (4000 // len(piece)))
    assert time.process_time() - started < 20  # 0.1 s are needed; exponential takes longer than anybody waits
