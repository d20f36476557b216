"""The same validation prompts, answered before training and after it, to read side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mcore_rl.json_text import read_json
from mcore_rl.tracking.console import number
from mcore_rl.tracking.page import text
from mcore_rl.tracking.run_files import RecordedRun
from mcore_rl.tracking.samples import sample_files

SampleRow = Mapping[str, Any]
OFFLINE_LOSSES = ("sft/loss", "prefer/loss", "reward/loss")  # of runs that draw nothing

# (right before, right after), name, and how many to show: those with the highest score in the end, in the order of the
# file, so that nobody picks them.  A reward tells more than right and wrong: of right answers, those with a sound way.
KINDS: tuple[tuple[tuple[bool, bool], str, int], ...] = (
    ((False, True), "learned", 3),
    ((True, False), "lost", 2),
    ((False, False), "still wrong", 2),
    ((True, True), "right both times", 1),
)


def pairs(first: Sequence[SampleRow], last: Sequence[SampleRow]) -> list[tuple[str, SampleRow, SampleRow]]:
    """(kind, before, after) for some of the prompts that both have; the first sample of each prompt."""
    after = _by_prompt(last)
    both = [(row, after[prompt]) for prompt, row in _by_prompt(first).items() if prompt in after]
    chosen = []
    for outcome, kind, most in KINDS:
        alike = [pair for pair in both if (bool(pair[0].get("correct")), bool(pair[1].get("correct"))) == outcome]
        alike.sort(key=lambda pair: -score_of(pair[1]))
        chosen += [(kind, *pair) for pair in alike[:most]]
    return chosen


def prompt_of(row: SampleRow) -> tuple[str, str]:
    """(data source, id) of the prompt that a sample answers."""
    return str(row.get("data_source")), str(row.get("prompt_id"))


def score_of(row: SampleRow) -> float:
    """The score of a sample; minus infinity if it has none."""
    score = row.get("score")
    return float(score) if isinstance(score, int | float) and score == score else float("-inf")


def before_after(run: RecordedRun) -> str:
    """The report's section that compares the first and the last validation with readable samples."""
    steps = list(sample_files(run.path, "validation"))
    first_step, first = _readable(run, steps)
    last_step, last = _readable(run, steps[::-1])
    if not last and any(run.values(key) for key in OFFLINE_LOSSES):
        return ""  # such training draws nothing
    if not last:
        return '<h2>Samples</h2><p class="soft">No validation samples were found in validation/.</p>'
    if first_step == last_step:
        shown = "".join(_pair(f"sample {k + 1}", {f"step {last_step}": row}) for k, row in enumerate(last[:5]))
        return f'<h2>Samples</h2><p class="soft">The first prompts of the only validation, step {last_step}.</p>{shown}'
    compared = pairs(first, last)
    note = (
        f"The same prompts at step {first_step} and at step {last_step}: of each outcome the few with the highest "
        f"score at step {last_step}, and of equal ones the first of the validation file."
    )
    if not compared:
        note = f"Steps {first_step} and {last_step} validated different prompts, so there is nothing to compare."
    shown = "".join(_pair(kind, {f"step {first_step}": a, f"step {last_step}": b}) for kind, a, b in compared)
    return f'<h2>Samples, before and after</h2><p class="soft">{text(note)}</p>{shown}'


def _readable(run: RecordedRun, steps: Sequence[int]) -> tuple[int, list[dict[str, Any]]]:
    """(the first of ``steps`` with readable samples, the samples); (-1, []) if there is none."""
    for step in steps:
        if rows := [row for row in run.samples(step, "validation") if row.get("prompt_id") is not None]:
            return step, rows
    return -1, []


def _by_prompt(rows: Sequence[SampleRow]) -> dict[tuple[str, str], SampleRow]:
    by_prompt: dict[tuple[str, str], SampleRow] = {}
    for row in rows:
        by_prompt.setdefault(prompt_of(row), row)
    return by_prompt


def _pair(kind: str, sides: Mapping[str, SampleRow]) -> str:
    row = next(iter(sides.values()))
    head = f"<h3>{text(kind)} <span class='soft'>{text(row.get('data_source', ''))}</span></h3>"
    prompt = f"<pre>{text(conversation(row.get('prompt', '')))}</pre>"
    gold = f"<p>Gold: <b>{text(row['ground_truth'])}</b></p>" if row.get("ground_truth") is not None else ""
    shown = "".join(
        f"<div>{_mark(step, each)}<pre>{text(each.get('response', ''))}</pre></div>" for step, each in sides.items()
    )
    return f'<div class="pair">{head}{prompt}{gold}<div class="sides">{shown}</div></div>'


def _mark(step: str, row: SampleRow) -> str:
    words = []
    if row.get("correct") is not None:
        right = bool(row["correct"])
        words.append(f'<span class="{"right" if right else "wrong"}">{"right" if right else "wrong"}</span>')
    if isinstance(row.get("score"), int | float):
        words.append(f"score {number(float(row['score']))}")
    if row.get("num_tokens") is not None:
        words.append(f"{text(row['num_tokens'])} tokens")
    if row.get("finish") is not None:
        words.append(f"finish: {text(row['finish'])}")
    return f"<p>{text(step)}: {', '.join(words)}</p>"


def conversation(prompt: Any) -> str:
    """Messages, or their JSON, as text with the roles; plain text unchanged."""
    if isinstance(prompt, str):
        try:
            messages = read_json(prompt) if prompt.startswith("[{") else None
        except ValueError:
            messages = None
    else:
        messages = prompt
    if isinstance(messages, list) and all(isinstance(m, dict) and "content" in m for m in messages):
        return "\n\n".join(f"{m.get('role', '')}: {m['content']}" for m in messages)
    return str(prompt)
