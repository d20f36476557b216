"""The course's own numbers: probe texts whose rewards the published functions gave, each looked over by hand.

The oracle: the five functions of grpo_demo.py as published, both versions, and those of Unsloth's notebook
Qwen2.5 (3B) GRPO, which equal the first, run on these texts; they are not part of this project.
"""

from __future__ import annotations

import pytest

from mcore_rl.config.reward import RewardConfig, XmlCompatibility, XmlConfig
from mcore_rl.rewards.score import RewardRequest, Score
from mcore_rl.rewards.xml_reasoning import grade_xml

FIRST, DOTALL = XmlCompatibility.grpo_demo, XmlCompatibility.grpo_demo_dotall
LINE = "<reasoning>\n1 + 1\n</reasoning>\n<answer>\n2\n</answer>\n"
LINES = "<reasoning>\n1 + 1\nis 2\n</reasoning>\n<answer>\n2\n</answer>\n"
FLAT = "<reasoning>r</reasoning><answer>2</answer>"
# Text -> correctness, integer, xmlcount; strict and soft form of the first version; of the one with re.DOTALL.
PROBES: dict[str, tuple[tuple[float, float, float], tuple[float, float], tuple[float, float]]] = {
    LINE: ((2.0, 0.5, 0.5), (0.5, 0.0), (0.5, 0.5)),  # first: "." ends at the break that the strict form demands
    LINES: ((2.0, 0.5, 0.5), (0.0, 0.0), (0.5, 0.5)),
    LINE[:-1]: ((2.0, 0.5, 0.45), (0.0, 0.0), (0.0, 0.5)),  # 0.5 - 0.051 for all 51 characters + 0.001 for -1
    LINE + "\n": ((2.0, 0.5, 0.498), (0.5, 0.0), (0.5, 0.5)),  # "$" stands before a last break, too
    LINE + "\n\n": ((2.0, 0.5, 0.496), (0.0, 0.0), (0.0, 0.5)),
    LINE + "bye": ((2.0, 0.5, 0.494), (0.0, 0.0), (0.0, 0.5)),  # 3 characters cost twice
    "well\n" + LINE: ((2.0, 0.5, 0.5), (0.0, 0.0), (0.0, 0.0)),  # re.match is from the beginning
    FLAT: ((2.0, 0.5, 0.0), (0.0, 0.5), (0.0, 0.5)),  # no breaks, no count
    "<reasoning>r</reasoning>\n\n<answer>2</answer> so": ((2.0, 0.5, 0.0), (0.0, 0.5), (0.0, 0.5)),
    "<reasoning>r\n</reasoning><answer>2</answer>": ((2.0, 0.5, 0.0), (0.0, 0.0), (0.0, 0.5)),
    # The second pair of tags is met where the first one's answer does not end on its line.
    "<reasoning>a</reasoning><answer>x</reasoning>\n<answer>2</answer>": ((2.0, 0.5, 0.0), (0.0, 0.5), (0.0, 0.5)),
    "<reasoning>a</reasoning><answer>x\n</reasoning>\n<answer>2</answer>": ((2.0, 0.5, 0.125), (0.0, 0.0), (0.0, 0.5)),
    "2": ((2.0, 0.5, 0.0), (0.0, 0.0), (0.0, 0.0)),  # a text without tags is its own answer
    "<answer>2": ((2.0, 0.5, 0.0), (0.0, 0.0), (0.0, 0.0)),
    "": ((0.0, 0.0, 0.0), (0.0, 0.0), (0.0, 0.0)),
    # The second end shares the first one's break: it counts once, and "</answer>\n" is behind it, 10 - 0 and 10 + 0.
    LINE + "</answer>\n": ((2.0, 0.5, 0.365), (0.0, 0.0), (0.5, 0.5)),
    LINE + LINE: ((2.0, 0.5, 0.0), (0.0, 0.0), (0.5, 0.5)),  # every tag twice
    "<answer>-2</answer>": ((0.0, 0.0, 0.0), (0.0, 0.0), (0.0, 0.0)),
    "<answer>2.0</answer>": ((0.0, 0.0, 0.0), (0.0, 0.0), (0.0, 0.0)),  # answers are texts
    "<answer>\u00b2</answer>": ((0.0, 0.5, 0.0), (0.0, 0.0), (0.0, 0.0)),  # "\u00b2".isdigit()
    "<reasoning>\n</reasoning>\n<answer>\n</answer>\n": ((0.0, 0.0, 0.5), (0.0, 0.0), (0.0, 0.5)),
}


def graded(text: str, version: XmlCompatibility, truth: object = "2", **weights: float) -> Score:
    config = RewardConfig(xml=XmlConfig(compatibility=version, **weights))
    return grade_xml(RewardRequest(("p", 0), "gsm8k_xml", text, truth), config)


@pytest.mark.parametrize("text", PROBES)
def test_the_numbers_are_the_courses_to_the_bit(text: str) -> None:
    (correct, integer, count), *forms = PROBES[text]
    for version, (strict, soft) in zip((FIRST, DOTALL), forms, strict=True):
        score = graded(text, version)
        bits = [each.hex() for each in score.parts.values()]
        expected = {"correctness": correct, "integer": integer, "strict_format": strict, "soft_format": soft}
        assert bits[:4] == [each.hex() for each in expected.values()]
        assert bits[4] == exact_count(text).hex() and score.parts["tag_count"] == pytest.approx(count, abs=1e-12)
        assert score.value == sum(score.parts.values()) and score.correct == correct / 2


def exact_count(text: str) -> float:
    """0.5 less each cost as the course subtracts it, for the probes that cost something: the last bits are its too."""
    return {
        LINE[:-1]: 0.375 - 51 * 0.001 + 0.125 - -1 * 0.001,
        LINE + "\n": 0.375 - 1 * 0.001 + 0.125 - 1 * 0.001,
        LINE + "\n\n": 0.375 - 2 * 0.001 + 0.125 - 2 * 0.001,
        LINE + "bye": 0.375 - 3 * 0.001 + 0.125 - 3 * 0.001,
        LINE + "</answer>\n": 0.375 - 10 * 0.001,
    }.get(text, PROBES[text][0][2])


def test_the_first_version_gives_three_and_a_half_at_most() -> None:
    """Five rewards of 4.0 in all; but one line break decides between the two forms."""
    assert max(graded(text, FIRST).value for text in PROBES) == graded(LINE, FIRST).value == 3.5
    assert graded(LINES, DOTALL).value == 4.0
    assert not any(strict and soft for _, (strict, soft), _ in PROBES.values())


def test_ground_truths_are_prepared_as_each_version_does() -> None:
    for said, first, later in (("1,000", True, False), ("1000", False, True)):
        whole = "so\n#### $1,000 " if not first else "so\n#### 1,000"
        assert [graded(f"<answer>{said}</answer>", each, whole).correct for each in (FIRST, DOTALL)] == [first, later]
    assert graded("<answer>1000</answer>", FIRST, 1000).correct == 1.0


def test_weights_scale_the_courses_parts() -> None:
    score = graded(LINE + "bye", FIRST, correctness=1.0, tag_count=1.0, strict_format=0.0)
    assert score.parts["correctness"] == 1.0
    assert score.parts["tag_count"] == 2 * graded(LINE + "bye", FIRST).parts["tag_count"]


def test_what_trails_can_cost_more_than_there_is() -> None:
    assert graded(LINE + "x" * 1000, FIRST).parts["tag_count"] == pytest.approx(0.5 - 2.0)


def test_hostile_text_takes_linear_time() -> None:
    pieces = ("<reasoning>", "</reasoning><answer>", "\n</reasoning>\n<answer>\n", "\n</answer>\n", "</reasoning> \n ")
    for piece in pieces:
        for version in (FIRST, DOTALL):
            graded("<reasoning>\n" + piece * 40_000, version)  # quadratic takes minutes: the test's limit is the check
            graded("<reasoning>" + piece * 40_000, version)
