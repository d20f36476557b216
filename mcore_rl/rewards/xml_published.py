"""The five rewards of the published GRPO course for GSM8K, to the bit: ``reward.xml.compatibility``.

The course is grpo_demo.py (gist willccbb/4676755236bb08cab5f4e54a0475d6fb) and the many notebooks made of it, such as
Unsloth's Qwen2.5 (3B) GRPO.  Two versions are in use, which differ in whether the pattern of a form lets ``.`` match
the end of a line.  This is a statement of what they compute, in linear time; docs/from_trl.md lists how it differs from
our own reading.
"""

from __future__ import annotations

import re

from mcore_rl.config.reward import XmlCompatibility

_BETWEEN = re.compile(r"</reasoning>\s*+<answer>")
_STRICT_LINES = re.compile(r"<reasoning>\n[^\n]*+\n</reasoning>\n<answer>\n[^\n]*+\n</answer>\n\n?")
_OPEN, _MIDDLE, _CLOSE = "<reasoning>\n", "\n</reasoning>\n<answer>\n", "\n</answer>\n"


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
