"""Grades ``<reasoning>...</reasoning><answer>...</answer>`` responses: the answer, and how well they keep the form.

Parts are already multiplied by their weights in ``reward.xml``; their sum is the value.

``reward.xml.compatibility`` asks for the five rewards of the published GRPO course for GSM8K instead of our own
reading, to the bit: ``published_shares``.  The course is grpo_demo.py (gist willccbb/4676755236bb08cab5f4e54a0475d6fb)
and the many notebooks made of it, such as Unsloth's Qwen2.5 (3B) GRPO.  Two versions are in use, which differ in
whether the pattern of a form lets ``.`` match the end of a line.  This is a statement of what they compute, in linear
time; docs/from_trl.md lists how it differs from our own reading.
"""

from __future__ import annotations

import re

from mcore_rl.config.reward import RewardConfig, XmlCompatibility
from mcore_rl.rewards.numbers import as_number, plain
from mcore_rl.rewards.score import RewardRequest, Score

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
    value = as_number(answer)
    gold_value = as_number(gold)
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


_STRICT_LINES = re.compile(r"<reasoning>\n[^\n]*+\n</reasoning>\n<answer>\n[^\n]*+\n</answer>\n\n?")
_OPEN = "<reasoning>\n"
_MIDDLE = "\n</reasoning>\n<answer>\n"
_CLOSE = "\n</answer>\n"


def published_shares(response: str, ground_truth: object, version: XmlCompatibility) -> tuple[dict[str, float], str]:
    """(the share of each part's weight that the course gives; the answer that it reads).

    ``tag_count`` is the course's xmlcount over its largest value, 0.5; it can be negative.
    """
    across_lines = version is XmlCompatibility.grpo_demo_dotall
    answer = response.rpartition("<answer>")[2].partition("</answer>")[0].strip()
    shares = {
        "correctness": float(answer == _gold(ground_truth, across_lines)),
        "integer": float(answer.isdigit()),
        "strict_format": float(_strict_text(response) if across_lines else bool(_STRICT_LINES.fullmatch(response))),
        "soft_format": float(_soft_text(response) if across_lines else _soft_lines(response)),
        "tag_count": _count(response) / 0.5,
    }
    return shares, answer


def _gold(ground_truth: object, newer: bool) -> str:
    """The ground truth; of a whole solution what follows its first ``####``, as each version prepares it."""
    text = str(ground_truth)
    if "####" not in text:
        return text
    number = text.split("####")[1].strip()
    return number.replace(",", "").replace("$", "") if newer else number


def _strict_text(text: str) -> bool:
    r"""``^<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n$``, where ``.`` is any character.

    ``$`` also stands before a last line break.
    """
    text = text[:-1] if text.endswith(f"{_CLOSE}\n") else text
    middle = text.find(_MIDDLE, len(_OPEN))
    return (
        text.startswith(_OPEN)
        and text.endswith(_CLOSE)
        and middle >= 0
        and len(text) >= middle + len(_MIDDLE) + len(_CLOSE)
    )


def _soft_text(text: str) -> bool:
    """``<reasoning>.*?</reasoning>\\s*<answer>.*?</answer>`` from the beginning, where ``.`` is any character."""
    between = _BETWEEN.search(text, len("<reasoning>"))
    return text.startswith("<reasoning>") and between is not None and "</answer>" in text[between.end() :]


def _soft_lines(text: str) -> bool:
    """The same, where ``.`` stays within a line: ``\\s*`` alone may pass its end."""
    if not text.startswith("<reasoning>"):
        return False
    end = text.find("\n", len("<reasoning>"))
    ends = [each.end() for each in _BETWEEN.finditer(text, len("<reasoning>")) if end < 0 or each.start() < end]
    # All but the last end within the first line, where the first of them sees all that the others see.
    return any("</answer>" in text[start:].partition("\n")[0] for start in {*ends[:1], *ends[-1:]})


def _count(text: str) -> float:
    """Eighths for tags beside line breaks, less a thousandth for each character after the end.

    Without a line break after ``</answer>`` the whole text is behind the end; floating point adds in this order.
    """
    count = 0.0
    for tag in ("<reasoning>\n", "\n</reasoning>\n"):
        count += 0.125 if text.count(tag) == 1 else 0.0
    if text.count("\n<answer>\n") == 1:
        count += 0.125
        count -= len(text.split("\n</answer>\n")[-1]) * 0.001
    if text.count("\n</answer>") == 1:
        count += 0.125
        count -= (len(text.split("\n</answer>")[-1]) - 1) * 0.001
    return count
