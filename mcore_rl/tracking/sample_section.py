"""The samples of a report: the same validation prompts before training and after it, and a place to browse samples.

A page cannot hold all samples of a long run.  It has those of some steps, the first, the last and every so-many-th
between, and of each step some samples: of rollouts those with the highest score, with the lowest, and the first of the
file; of validations the same prompts at every step.  The page says how many of how many.  Long texts lose their middle.
It holds thumbnails of their pictures, as ``data:`` addresses.

Samples are what a model wrote: they are data of the page (JSON, in which no ``<`` stands), and the script shows them as
text alone.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mcore_rl.ground.json_text import read_json
from mcore_rl.tracking.console import number
from mcore_rl.tracking.page import UNPRINTABLE, text
from mcore_rl.tracking.run_files import RecordedRun
from mcore_rl.tracking.samples import Kind, sample_files, thumbnail_file

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

MAX_STEPS = 24  # of a kind
MOST = 30  # samples of a step, and fewer of long ones
FEWEST = 3
MAX_BYTES = 450_000  # of a kind, as JSON
MAX_TEXT = 3000  # characters of a prompt or a response
PromptKey = tuple[str, str, str, str | None, tuple[int, ...]]  # as the script reads it, with numbers of pictures
COLUMNS = (
    "data_source",
    "prompt_id",
    "prompt",
    "ground_truth",
    "response",
    "score",
    "correct",
    "num_tokens",
    "finish",
    "error",
    "segments",
    "reason",
    "images",
)
MAX_PICTURES = 64  # of a report, different ones
MAX_PICTURE_BYTES = 64 << 10  # of a file
_SHA256 = re.compile(r"[0-9a-f]{64}")


def pairs(first: Sequence[SampleRow], last: Sequence[SampleRow]) -> list[tuple[str, SampleRow, SampleRow]]:
    """(kind, before, after) for some of the prompts that both have; the first sample of each prompt."""
    after = _first_places(last)
    both = [(first[at], last[after[prompt]]) for prompt, at in _first_places(first).items() if prompt in after]
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


def _first_places(rows: Sequence[SampleRow]) -> dict[tuple[str, str], int]:
    """Prompt -> place of its first sample."""
    places: dict[tuple[str, str], int] = {}
    for at, row in enumerate(rows):
        places.setdefault(prompt_of(row), at)
    return places


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
        right = "right" if row["correct"] else "wrong"
        words.append(f'<span class="{right}">{right}</span>')
    if isinstance(row.get("score"), int | float):
        words.append(f"score {number(float(row['score']))}")
    if row.get("num_tokens") is not None:
        words.append(f"{text(row['num_tokens'])} tokens")
    if row.get("finish") is not None:
        words.append(f"finish: {text(row['finish'])}")
    return f"<p>{text(step)}: {', '.join(words)}</p>"


def conversation(prompt: Any) -> str:
    """Messages, or their JSON, as text with the roles; plain text unchanged."""
    messages = prompt
    if isinstance(prompt, str) and prompt.startswith("[{"):
        with suppress(ValueError):
            messages = read_json(prompt)
    if isinstance(messages, list) and all(isinstance(m, dict) and "content" in m for m in messages):
        return "\n\n".join(f"{m.get('role', '')}: {m['content']}" for m in messages)
    return str(prompt)


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
    return {
        step: [at for prompt, at in _first_places(rows).items() if prompt in wanted] for step, rows in by_step.items()
    }


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
        step,
        prompts.setdefault(key, len(prompts)),
        score if abs(score) < float("inf") else None,
        None if correct is None else int(bool(correct)),
        row.get("num_tokens"),
        None if finish is None else shortened(str(finish)),
        "" if turns else shortened(str(row.get("response", ""))),
        None if error is None else shortened(str(error)),
        at,
        turns,
        row.get("finish") == "length",
    ]


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
                shortened(str(each["author"])),
                shortened(str(each["text"])),
                int(each["num_tokens"]),
                int(bool(each["trained"])),
                None if each["reward"] is None else float(each["reward"]),
                [int(version) for version in each.get("versions") or ()],
                round(float(each.get("tool_s") or 0.0), 2),
            ]
            for each in read[1:]
        ]
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError):
        return None


class ShownPictures:
    """The pictures of a page by number: each is on it once, and at most ``MAX_PICTURES`` with a thumbnail."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._numbers = dict[str, int]()
        self._names: list[str] = []

    def numbers_of(self, images: object) -> list[int]:
        """The numbers of a sample's pictures.

        images: the value of its column ``images``; [] where that is none, as of a run of text.
        """
        try:
            read: Any = read_json(images) if isinstance(images, str) else images
            pictures = [(str(each["sha256"]), str(each["source"])) for each in read or ()]
        except (ValueError, TypeError, LookupError):
            return []
        for sha256, source in pictures:
            if sha256 not in self._numbers:
                self._numbers[sha256] = len(self._names)
                self._names.append(source.rpartition("/")[2])
        return [self._numbers[sha256] for sha256, _ in pictures]

    def plain(self, order: Sequence[int]) -> list[list[Any]]:
        """[name, address] of each picture as the page's script reads it; the address of one that is not shown is "".

        order: numbers of those to show, the first ``MAX_PICTURES`` that have a thumbnail.
        """
        hashes = list(self._numbers)
        addresses = dict[int, str]()
        for picture in dict.fromkeys(order):
            if len(addresses) == MAX_PICTURES:
                break
            if address := _address(self._run_dir, hashes[picture]):
                addresses[picture] = address
        return [[name, addresses.get(picture, "")] for picture, name in enumerate(self._names)]


def _address(run_dir: Path, sha256: str) -> str:
    """The ``data:`` address of a thumbnail; "" if there is none."""
    if not _SHA256.fullmatch(sha256):
        return ""
    try:
        with thumbnail_file(run_dir, sha256).open("rb") as file:
            content = file.read(MAX_PICTURE_BYTES + 1)
    except OSError:
        return ""
    if content[:4] != b"RIFF" or content[8:12] != b"WEBP" or len(content) > MAX_PICTURE_BYTES:
        return ""
    return f"data:image/webp;base64,{b64encode(content).decode()}"
