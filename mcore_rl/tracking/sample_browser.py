"""The samples that a report carries, and the place where its script shows them.

A page cannot hold all samples of a long run.  It has those of some steps, the first, the last and every so-many-th
between, and of each step some samples: of rollouts those with the highest score, with the lowest, and the first of the
file; of validations the same prompts at every step.  The page says how many of how many.  Long texts lose their middle.

Samples are what a model wrote: they are data of the page (JSON, in which no ``<`` stands), and the script shows them as
text alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mcore_rl.json_text import read_json
from mcore_rl.tracking.before_after import SampleRow, conversation, pairs, prompt_of, score_of
from mcore_rl.tracking.page import UNPRINTABLE
from mcore_rl.tracking.run_files import RecordedRun
from mcore_rl.tracking.samples import Kind, sample_files
from mcore_rl.tracking.thumbnails import ShownPictures

MAX_STEPS = 24  # of a kind
MOST, FEWEST = 30, 3  # samples of a step, by how long they are
MAX_BYTES = 450_000  # of a kind, as JSON
MAX_TEXT = 3000  # characters of a prompt or a response
PromptKey = tuple[str, str, str, str | None, tuple[int, ...]]  # as the script reads it, with numbers of pictures
COLUMNS = (
    "data_source", "prompt_id", "prompt", "ground_truth",
    "response", "score", "correct", "num_tokens", "finish", "error", "segments", "reason", "images",
)  # fmt: skip


def sample_browser(run: RecordedRun) -> str:
    """The section's HTML; "" if the run has no samples."""
    prompts: dict[PromptKey, int] = {}
    pictures = ShownPictures(run.path)
    kinds: tuple[Kind, ...] = ("validation", "rollouts")
    sources = [source for kind in kinds if (source := _source(run, kind, prompts, pictures))]
    if not sources:
        return ""
    # The newest first: of rollouts every step has others.
    of_rows = [row[1] for source in sources for row in reversed(source["rows"])]
    asked = [list(prompt) for prompt in prompts]
    order = [number for prompt in of_rows for number in asked[prompt][4]]
    data = as_data({"sources": sources, "prompts": asked, "pictures": pictures.plain(order)})
    return (
        f'<h2>Browse samples</h2><script type="application/json" id="sample-data">{data}</script>'
        '<div id="sample-browser"><p class="soft">The page\'s script shows samples here.</p></div>'
    )


def as_data(value: object) -> str:
    """``value`` as JSON that neither ends the element around it nor is markup to any parser."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def chosen_steps(steps: Sequence[int]) -> list[int]:
    """At most ``MAX_STEPS`` of ``steps``: the first, the last, and those that a power of two divides.

    As the run goes on, a step leaves only when the power doubles, so that a reader of a live page keeps his place.
    """
    power = 1
    while len(kept := [step for step in steps[1:-1] if step % power == 0]) > MAX_STEPS - 2:
        power *= 2
    return [*steps[:1], *kept, *steps[1:][-1:]]


def shortened(text: str) -> str:
    """``text`` without its middle, if it is longer than ``MAX_TEXT``; printable."""
    if len(text) > MAX_TEXT:
        half = MAX_TEXT // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half:,} characters are left out here ...]\n{text[-half:]}"
    return UNPRINTABLE.sub("\ufffd", text)


def _source(run: RecordedRun, kind: Kind, prompts: dict[PromptKey, int], pictures: ShownPictures) -> dict[str, Any]:
    """The samples of one kind as plain values; {} if there are none.  prompts, pictures: grow by theirs."""
    steps = list(sample_files(run.path, kind))
    by_step = {step: there for step in chosen_steps(steps) if (there := run.samples(step, kind, COLUMNS))}
    if not by_step:
        return {}
    counts = [len(rows) for rows in by_step.values()]
    for most in range(MOST, FEWEST - 1, -3):
        fresh = dict(prompts)
        chosen = _of_prompts(by_step, most) if kind == "validation" else _by_score(by_step, most)
        rows = [
            _plain(step, at, by_step[step][at], fresh, pictures) for step, places in chosen.items() for at in places
        ]
        size = len(as_data([rows, list(fresh)[len(prompts) :]]).encode("utf-8", "replace"))
        if size <= MAX_BYTES:
            break
    prompts |= fresh
    rule = "the same prompts at each" if kind == "validation" else "the highest scores, the lowest, and the first drawn"
    many = max(counts) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    of_each = max(len(places) for places in chosen.values())
    note = f"{len(by_step)} of {len(steps)} steps are on this page, of each up to {of_each} of {many} samples: {rule}."
    return {"name": kind, "note": note, "steps": list(by_step), "rows": rows}


def _by_score(by_step: Mapping[int, Sequence[SampleRow]], most: int) -> dict[int, list[int]]:
    """Step -> places of its samples: a third each with the highest score, the lowest, and the first that are left."""
    chosen = {}
    for step, rows in by_step.items():
        ordered = sorted(range(len(rows)), key=lambda at: -score_of(rows[at]))
        third = most // 3
        extreme = dict.fromkeys([*ordered[:third], *ordered[-third:]])
        rest = [at for at in range(len(rows)) if at not in extreme]
        chosen[step] = sorted([*extreme, *rest[: most - len(extreme)]])
    return chosen


def _of_prompts(by_step: Mapping[int, Sequence[SampleRow]], most: int) -> dict[int, list[int]]:
    """Step -> places of its first samples of ``most`` prompts: those that are compared above, and the file's first."""
    first, last = (by_step[step] for step in (min(by_step), max(by_step)))
    told = [prompt_of(after) for _, _, after in pairs(first, last)]
    wanted = set(list(dict.fromkeys([*told, *map(prompt_of, last), *map(prompt_of, first)]))[:most])
    chosen = {}
    for step, rows in by_step.items():
        places: dict[tuple[str, str], int] = {}
        for at, row in enumerate(rows):
            if prompt_of(row) in wanted:
                places.setdefault(prompt_of(row), at)
        chosen[step] = sorted(places.values())
    return chosen


def _plain(step: int, at: int, row: SampleRow, prompts: dict[PromptKey, int], pictures: ShownPictures) -> list[Any]:
    """A sample as the script reads it; ``prompts`` grows by its prompt, and ``pictures`` by those of the prompt."""
    gold = row.get("ground_truth")
    source, prompt_id = prompt_of(row)
    asked = shortened(conversation(row.get("prompt", "")))
    shown = tuple(pictures.numbers_of(row.get("images")))
    key = (shortened(source), shortened(prompt_id), asked, None if gold is None else shortened(str(gold)), shown)
    score = score_of(row)
    correct = row.get("correct")
    error = row.get("error")
    turns = _turns(row.get("segments"))
    finish = row.get("reason") or row.get("finish")
    return [
        step, prompts.setdefault(key, len(prompts)), score if abs(score) < float("inf") else None,
        None if correct is None else int(bool(correct)), row.get("num_tokens"),
        None if finish is None else shortened(str(finish)),
        "" if turns else shortened(str(row.get("response", ""))),
        None if error is None else shortened(str(error)), at, turns, row.get("finish") == "length",
    ]  # fmt: skip


def _turns(segments: object) -> list[list[Any]] | None:
    """What follows the prompt, a turn each: [author, text, tokens, trained, reward, versions, seconds in tools].

    segments: the column's JSON; None, or what is no list of segments, as of a run of long ago: None.
    """
    try:
        read = read_json(segments) if isinstance(segments, str) else None
        if not isinstance(read, list):
            return None
        return [
            [
                shortened(str(each["author"])), shortened(str(each["text"])), int(each["num_tokens"]),
                int(bool(each["trained"])), None if each["reward"] is None else float(each["reward"]),
                [int(version) for version in each.get("versions") or ()], round(float(each.get("tool_s") or 0.0), 2),
            ]
            for each in read[1:]
        ]  # fmt: skip
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError):
        return None
