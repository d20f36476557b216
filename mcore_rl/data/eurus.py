"""Rows of Eurus-2-RL-Data (arXiv:2502.01456): mathematics of NuminaMath-CoT, and programs with test cases.

They are published in our schema.  Each is kept as it is, with its system prompt, and checked: what graders could not
read is refused here, before anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_rl.json_text import read_json

HUB_ID = "PRIME-RL/Eurus-2-RL-Data"
SPLITS = ("train", "validation")
# By data_source, the ability; the graders of these names are those that verl gives them.
ABILITIES = {
    **dict.fromkeys(
        (
            "numina_aops_forum", "numina_synthetic_math", "numina_amc_aime", "numina_synthetic_amc", "numina_cn_k12",
            "numina_olympiads",
        ),
        "math",
    ),
    **dict.fromkeys(("apps", "codecontests", "codeforces", "taco"), "code"),
}  # fmt: skip
REMEDY = "Take the files as published"


def checked(fields: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """(data source, the system's message or "", the user's, the ground truth) of a record.

    ValueError, with the problem and the remedy: its data source is another, it is no prompt with a ground truth, or
    the ground truth of code holds no test cases.
    """
    source = fields.get("data_source")
    if source not in ABILITIES:
        raise ValueError(f"data_source is {source!r}, and none of {', '.join(ABILITIES)}. {REMEDY}")
    if fields.get("ability") != ABILITIES[source]:
        raise ValueError(f"ability is {fields.get('ability')!r}, and {source} is {ABILITIES[source]}. {REMEDY}")
    said = _messages(fields.get("prompt"))
    if tuple(role for role, _ in said) not in (("user",), ("system", "user")):
        raise ValueError(f"prompt is not a message of the user's, with or without one of the system's. {REMEDY}")
    truth = (fields.get("reward_model") or {}).get("ground_truth")
    if not isinstance(truth, str) or not truth.strip():
        raise ValueError(f"reward_model.ground_truth is no text. {REMEDY}")
    if ABILITIES[source] == "code":
        _check_cases(truth)
    return source, said[0][1] if len(said) == 2 else "", said[-1][1], truth


def _messages(prompt: object) -> list[tuple[str, str]]:
    """(role, text) of each message; nothing where one has no text."""
    messages = prompt if isinstance(prompt, list) else []
    said = [(each.get("role"), each.get("content")) for each in messages if isinstance(each, Mapping)]
    return [(str(role), text) for role, text in said if isinstance(text, str) and text.strip()]


def _check_cases(truth: str) -> None:
    """ValueError: ``truth`` is not JSON of as many inputs as outputs, at least one."""
    try:
        cases = read_json(truth)
    except ValueError as error:
        raise ValueError(f"reward_model.ground_truth is no JSON: {error}. {REMEDY}") from error
    lists = [cases.get(name) if isinstance(cases, dict) else None for name in ("inputs", "outputs")]
    sizes = {len(each) if isinstance(each, list) else 0 for each in lists}
    if len(sizes) != 1 or sizes == {0}:
        raise ValueError(f"reward_model.ground_truth has no inputs with an output each. {REMEDY}")
