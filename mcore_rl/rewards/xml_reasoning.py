"""Grades ``<reasoning>...</reasoning><answer>...</answer>`` responses: the answer, and how well they keep the form.

Parts are already multiplied by their weights in ``reward.xml``; their sum is the value.  This is our own reading;
``xml_published.py`` has that of the published course.
"""

from __future__ import annotations

import re

from mcore_rl.config.reward import RewardConfig, XmlCompatibility
from mcore_rl.rewards.numbers import as_number, plain
from mcore_rl.rewards.score import RewardRequest, Score
from mcore_rl.rewards.xml_published import published_shares

TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
TRAILING_COST = 0.001  # share of the tag count that each character after the last tag loses

_STRICT = re.compile(r"<reasoning>\n(.*)\n</reasoning>\n<answer>\n(.*)\n</answer>\n?", re.DOTALL)
_BETWEEN = re.compile(r"</reasoning>\s*+<answer>")


def xml_answer(response: str) -> str:
    """The text between the last ``<answer>`` and the ``</answer>`` after it; empty if there is none."""
    _, opened, rest = response.rpartition("<answer>")
    inside, closed, _ = rest.partition("</answer>")
    return inside.strip() if opened and closed else ""


def tag_count(response: str) -> float:
    """A quarter per tag that occurs exactly once, minus 0.001 per character after ``</answer>``; 0 to 1."""
    share = sum(response.count(tag) == 1 for tag in TAGS) / len(TAGS)
    trailing = response.rpartition("</answer>")[2].strip() if "</answer>" in response else ""
    return max(0.0, share - TRAILING_COST * len(trailing))


def _soft(response: str) -> bool:
    """Whether the response contains ``<reasoning>...</reasoning> <answer>...</answer>``; in linear time."""
    start = response.find("<reasoning>")
    between = _BETWEEN.search(response, start) if start >= 0 else None
    return between is not None and "</answer>" in response[between.end() :]


def _strict(response: str) -> bool:
    """Whether the response is these two pairs of tags and nothing else, each tag once and on a line of its own."""
    return all(response.count(tag) == 1 for tag in TAGS) and _STRICT.fullmatch(response) is not None


def same_answer(answer: str, ground_truth: object) -> bool:
    """Whether both are equal: as numbers if both are numbers, else as text without surrounding space."""
    gold = str(ground_truth).rpartition("####")[2].strip()
    value, gold_value = as_number(answer), as_number(gold)
    return answer == gold if value is None or gold_value is None else value == gold_value


def shares(response: str, ground_truth: object) -> tuple[dict[str, float], str]:
    """(the share of each part's weight, 0 to 1; the answer)."""
    answer = xml_answer(response)
    parts = {
        "correctness": float(bool(answer) and same_answer(answer, ground_truth)),
        "integer": float(answer.isascii() and answer.removeprefix("-").isdigit()),
        "strict_format": float(_strict(response)),
        "soft_format": float(_soft(response)),
        "tag_count": tag_count(response),
    }
    return parts, answer


def grade_xml(request: RewardRequest, config: RewardConfig) -> Score:
    """The sum of the weighted parts of ``reward.xml``: correctness, integer, strict_format, soft_format, tag_count."""
    weights = config.xml
    if weights.compatibility is XmlCompatibility.none:
        of_parts, answer = shares(request.response, request.ground_truth)
        value = as_number(answer)
    else:
        of_parts, answer = published_shares(request.response, request.ground_truth, weights.compatibility)
        value = None
    parts = {name: getattr(weights, name) * share for name, share in of_parts.items()}
    said = (answer if value is None else plain(value)) or None
    return Score(sum(parts.values()), parts, correct=of_parts["correctness"], answer=said)
