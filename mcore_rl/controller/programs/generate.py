"""``mcore-rl generate``: ``rollout.n`` responses to every prompt of some files, into a parquet file beside them.

No trainer and no grading: ``evaluate`` grades.  Invariant: a response follows from weights, prompt, its number and
``rollout.seed``, as in validation, so that the same checkpoint gives the same responses in both.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from rich.console import Console

from mcore_rl.config.generate import GenerateConfig, generate_violations
from mcore_rl.controller.step.rollout_collection import sampling_of
from mcore_rl.data.prompts import PromptSet
from mcore_rl.data.responses import LENGTH, Generated, taken_columns, write_responses
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.episodes import ROLES, Episode, prompt_segment
from mcore_rl.errors import DataError, Violation, refuse_if_any
from mcore_rl.parallel.device import Platform, detect
from mcore_rl.rollout.engine.admission import admit
from mcore_rl.rollout.engine.environment import has_tokenizer
from mcore_rl.rollout.protocol import Prompt, SampleSource, Sampling, requests_of
from mcore_rl.rollout.single_turn import single_turn
from mcore_rl.runtime.cluster import ray_cluster
from mcore_rl.runtime.placement import place_engines
from mcore_rl.runtime.start import pool_of, start_engines
from mcore_rl.tracking.progress import WorkProgress


async def run_generate(config: GenerateConfig) -> int:
    """Read prompts, draw responses, write ``config.out``; returns the exit code 0.

    Raises ConfigError and kin with everything that keeps it from starting, before any process does.
    """
    platform, console = detect(config.rollout.device), Console(stderr=True)
    config, prompts = prepare(config, platform)
    _say(console, prompts.describe())
    rollout, out = config.rollout, Path(config.out)
    table = prompts.table()
    async with AsyncExitStack() as stack:
        _say(console, "starting Ray and the rollout engines")
        stack.enter_context(ray_cluster(config.ray_init))
        places = await place_engines(rollout.layout, platform)
        stack.callback(places.close)
        directory, logs = Path(config.model.path), logs_beside(out)
        engines = await start_engines(directory, rollout, places.rollout, platform, logs, stack)
        with WorkProgress("generating", len(prompts) * rollout.n, "tokens") as work:
            sampling = sampling_of(rollout, rollout, rollout.seed)
            groups = await draw(pool_of(engines, rollout), prompts, rollout.n, sampling, work.advance)
            rate = work.rate
        write_responses(out, table, groups)
    every = [each for group in groups for each in group]
    mean = fmean(each.num_tokens for each in every)
    cut = sum(each.finish == LENGTH for each in every)
    said = f"{out}: {len(groups):,} prompts, {rollout.n} responses each, of {mean:.1f} tokens in the mean"
    _say(Console(), f"{said}; {cut:,} cut off at {rollout.max_response_length} tokens; {rate:,.0f} tokens/s")
    return 0


def prepare(config: GenerateConfig, platform: Platform) -> tuple[GenerateConfig, PromptSet]:
    """``config`` with absolute paths, and the prompts.  Raises as ``run_generate``."""
    refuse_if_any([*generate_violations(config), *place_violations(config)])
    directory = Path(config.model.path).expanduser().resolve()
    out = Path(config.out).expanduser().resolve()
    config = replace(config, model=replace(config.model, path=str(directory)), out=str(out))
    admit(directory, config.rollout, platform)
    if not has_tokenizer(directory):
        problem, remedy = "has no tokenizer, so that responses have no text", "Copy the tokenizer's files there"
        refuse_if_any([Violation("model.path", str(directory), problem, remedy)])
    tokenizer = load_tokenizer(config.model.tokenizer_path or directory)
    files, limit, title = config.data.files, config.data.max_samples, "data.files"
    prompts = PromptSet.load(files, config.data.prompts, tokenizer, max_samples=limit, title=title, graded=False)
    taken = taken_columns(prompts.table().column_names)
    if taken:
        problem = f"there is a column {', '.join(taken)} already. Rename it, or generate from the file without it"
        raise DataError(title, [problem])
    return config, prompts


def place_violations(config: GenerateConfig) -> list[Violation]:
    """The violations that keep ``config.out`` from being written."""
    if not config.out:
        return []  # generate_violations says so
    out = Path(config.out).expanduser().resolve()
    if out.is_dir():
        return [Violation("out", config.out, "is a directory", "Write the name of a parquet file in it")]
    if out in [Path(file).expanduser().resolve() for file in config.data.files]:
        return [Violation("out", config.out, "is one of data.files", "Write another name")]
    if out.exists() and not config.overwrite:
        return [Violation("out", config.out, "exists", "Write another name, or overwrite=true")]
    return []


def logs_beside(out: Path) -> Path:
    """The folder of the engines' logs: ``answers.parquet`` has ``answers-logs``."""
    return out.with_name(f"{out.stem}-logs")


async def draw(
    engine: SampleSource, prompts: PromptSet, n: int, sampling: Sampling, report: Callable[[int], None]
) -> list[list[Generated]]:
    """Samples ``n`` responses to each of ``prompts``, in order.  report: called with each response's token count."""
    rows = [prompts[index] for index in range(len(prompts))]
    places = {row.id: place for place, row in enumerate(rows)}
    assert len(places) == len(rows), "ids name rows"
    by_row: list[dict[int, Generated]] = [{} for _ in rows]
    segments = [prompt_segment(row) for row in rows]
    requests = requests_of([Prompt(id=row.id, tokens=row.tokens) for row in rows], n)
    async for sample in engine.generate(requests, sampling):
        place = places[sample.prompt_id]
        made = generated(single_turn(rows[place], segments[place], sample, place))
        by_row[place][sample.index] = made
        report(made.num_tokens)
    return [[group[index] for index in range(n)] for group in by_row]


def generated(episode: Episode) -> Generated:
    """The row of ``episode`` in the file: its texts and lengths, without tokens."""
    turns = [
        {"role": ROLES[segment.author], "content": segment.text, "num_tokens": len(segment.tokens)}
        for segment in episode.segments[1:]
    ]
    return Generated(
        text=episode.response,
        num_tokens=episode.num_response_tokens,
        finish=episode.end.value,
        turns=() if episode.is_single_turn else tuple(turns),
    )


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
