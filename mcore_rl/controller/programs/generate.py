"""``mcore-rl generate``: ``rollout.n`` responses to every prompt of some files, into a parquet file beside them.

No trainer and no grading: ``evaluate`` grades.  Invariant: a response follows from weights, prompt, its number and
``rollout.seed``, as in validation, so that the same checkpoint gives the same responses in both.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from mcore_rl.agents.runner import AgentRunner
from mcore_rl.config.bounds import file_violations
from mcore_rl.config.compose import as_dict
from mcore_rl.config.generate import GenerateConfig, generate_violations
from mcore_rl.config.role_groups import MODEL_VIEW
from mcore_rl.config.trainer import RayInitConfig
from mcore_rl.controller.lifecycle.messages import outcome, warn
from mcore_rl.controller.lifecycle.model_checks import prepare_model
from mcore_rl.controller.lifecycle.preparation import demand_shown, rows_of
from mcore_rl.controller.step.rollout_collection import sampling_of
from mcore_rl.data.media.prompts import picture_reader
from mcore_rl.data.prompts import PromptRow, PromptSet
from mcore_rl.data.responses import (
    LENGTH,
    AgentRecord,
    Generated,
    agent_summary,
    agents_line,
    taken_columns,
    write_responses,
)
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.families.config_json import read_config
from mcore_rl.families.registry import model_of
from mcore_rl.ground.errors import DataError, Violation, refuse_if_any
from mcore_rl.parallel.device import Platform, detect
from mcore_rl.rollout.episodes import ROLES, AgentCounts, Episode, prompt_segment
from mcore_rl.rollout.pool import EnginePool
from mcore_rl.rollout.prompt_pictures import PictureShelf, SeeingSource
from mcore_rl.rollout.protocol import Prompt, Request, SampleSource, Sampling, requests_of
from mcore_rl.rollout.served import Served
from mcore_rl.rollout.single_turn import single_turn
from mcore_rl.rollout.vllm.engine.admission import admit, demand_plain_weights
from mcore_rl.rollout.vllm.engine.environment import has_tokenizer
from mcore_rl.runtime.cluster import ray_cluster
from mcore_rl.runtime.placement import place_engines
from mcore_rl.runtime.seen_paths import demand_seen
from mcore_rl.runtime.start import pool_of, start_engines
from mcore_rl.tracking.journal import Journal, journal, journal_of, sum_of
from mcore_rl.tracking.messages import say
from mcore_rl.tracking.progress import WorkProgress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_EPISODES = 16_384  # of agents that run at the same time: as many as 64 engines with 256 sequences have room for


async def run_generate(config: GenerateConfig) -> int:
    """Read prompts, draw responses, write ``config.out``; returns the exit code 0.

    Killed, the same command goes on with the responses that are there, and writes the same file.

    Raises ConfigError and kin with everything that keeps it from starting, before any process does.
    """
    platform = detect(config.rollout.device)
    config, prompts, agents = prepare(config, platform)
    say(prompts.describe())
    rollout = config.rollout
    out = Path(config.out)
    table = prompts.table()
    async with AsyncExitStack() as stack:
        stack.callback(agents.close)
        kept = stack.enter_context(journal(out, work_of(config, prompts), afresh=config.overwrite))
        if kept.entries:
            say(f"going on with {journal_of(out)}, which has {len(kept.entries):,} responses")
        say(f"starting Ray and the rollout engines, which compute in {rollout.dtype.value}")
        pool = await stack.enter_async_context(opened_pool(config, platform))
        with WorkProgress("generating", len(prompts) * rollout.n, "tokens") as work:
            sampling = sampling_of(rollout, rollout, rollout.seed)
            groups = await draw(pool, prompts, rollout.n, sampling, work.advance, kept, agents)
            rate = work.rate
        write_responses(out, table, groups)
    every = [each for group in groups for each in group]
    mean = fmean(each.num_tokens for each in every)
    cut = sum(each.finish == LENGTH for each in every)
    said = f"{out}: {len(groups):,} prompts, {rollout.n} responses each, of {mean:.1f} tokens in the mean"
    outcome(f"{said}; {cut:,} cut off at {rollout.max_response_length} tokens; {rate:,.0f} tokens/s")
    if summary := agent_summary([each.agent for each in every]):
        outcome(agents_line(summary))
    return 0


def check_generate(config: GenerateConfig) -> int:
    """Read and check all that ``run_generate`` needs, and start nothing; returns the exit code 0."""
    config, prompts, agents = prepare(config, detect(config.rollout.device))
    agents.close()
    outcome(f"nothing is wrong: {len(prompts) * config.rollout.n:,} responses. Nothing was started")
    outcome(prompts.describe())
    return 0


def prepare(config: GenerateConfig, platform: Platform) -> tuple[GenerateConfig, PromptSet, AgentRunner]:
    """``config`` with absolute paths, the prompts, and what runs those of agents.  Raises as ``run_generate``."""
    refuse_if_any([*generate_violations(config), *file_violations(config)])
    config, tokenizer = prepare_engines(config, platform)
    agents = AgentRunner(config.rollout.agent, config.reward.code, tokenizer, config.data.chat_template_kwargs)
    try:
        return config, _prompts(config, tokenizer, agents), agents
    except BaseException:
        agents.close()
        raise


def prepare_engines(config: GenerateConfig, platform: Platform) -> tuple[GenerateConfig, PreTrainedTokenizerBase]:
    """``config`` with absolute paths, and the tokenizer, once engines may start.  Raises as ``run_generate``."""
    directory = Path(config.model.path).expanduser().resolve()
    out = Path(config.out).expanduser().resolve()
    config = replace(config, model=replace(config.model, path=str(directory)), out=str(out))
    directory = model_directory(config)
    sees = config.data.sees_pictures
    prepare_model(config.model, directory, pictures=sees)
    admit(directory, config.rollout, platform, pictures=sees)
    demand_plain_weights(directory, config.rollout)
    if not has_tokenizer(directory):
        problem = "has no tokenizer, so that responses have no text"
        remedy = "Copy the tokenizer's files there"
        refuse_if_any([Violation("model.path", str(directory), problem, remedy)])
    return config, load_tokenizer(config.model.tokenizer_path or directory)


@asynccontextmanager
async def opened_pool(config: GenerateConfig, platform: Platform) -> AsyncIterator[EnginePool]:
    """While open: Ray, the engines of ``config``, and what draws from them.  config: of ``prepare_engines``."""
    rollout = config.rollout
    async with AsyncExitStack() as stack:
        stack.enter_context(ray_cluster(config.ray_init))
        places = await place_engines(rollout.layout, platform)
        stack.callback(places.close)
        directory = model_directory(config)
        await demand_seen({"model.path": directory}, places.nodes)
        logs = logs_beside(Path(config.out))
        sees = config.data.sees_pictures
        bundles = places.rollout
        served = Served(name="engine", directory=directory, config=rollout, pictures=sees)
        engines = await start_engines(served, bundles, platform, logs, stack)
        yield pool_of(engines, rollout)


def _prompts(config: GenerateConfig, tokenizer: PreTrainedTokenizerBase, agents: AgentRunner) -> PromptSet:
    """The prompts, with all that agents need of them.  DataError, ConfigError: with what is wrong."""
    files = config.data.files
    limit = config.data.max_samples
    title = "data.files"
    _, model = model_of(read_config(model_directory(config)), pictures=config.data.sees_pictures)
    pictures = picture_reader(config.data, model)
    prompts = PromptSet.load(
        files,
        config.data.prompts,
        tokenizer,
        max_samples=limit,
        title=title,
        graded=False,
        agents=agents,
        pictures=pictures,
    )
    taken = taken_columns(prompts.table().column_names)
    if taken:
        problem = f"there is a column {', '.join(taken)} already. Rename it, or generate from the file without it"
        raise DataError(title, [problem])
    has_agents, notes = agents.check_rows(rows_of(prompts))
    if has_agents and pictures is not None:
        demand_shown(rows_of(prompts), agents, pictures.key)
    for line in notes:
        warn(line)
    return prompts


def work_of(config: GenerateConfig, prompts: PromptSet) -> dict[str, Any]:
    """What the responses follow from: the settings, the weights' files, the prompts' tokens, the agents' files."""
    weights = sorted(Path(config.model.path).glob("*.safetensors"))
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in weights]
    settings = as_dict(replace(config, out="", overwrite=False, ray_init=RayInitConfig()))
    own = {path: sum_of(path) for path in config.rollout.agent.files}
    return {"settings": settings, "weights": files, "prompts": [_shown(row) for row in rows_of(prompts)], "agents": own}


def _shown(row: PromptRow) -> tuple[Any, ...]:
    """What a model is shown of a prompt."""
    return row.id, row.tokens, *(each.image.sha256 for each in row.media)


def model_directory(config: GenerateConfig) -> Path:
    """The checkpoint as it is read: ``model.path``, or where it is changed its view among the logs."""
    return logs_beside(Path(config.out)) / MODEL_VIEW if config.model.is_changed else Path(config.model.directory)


def logs_beside(out: Path) -> Path:
    """The folder of the engines' logs: ``answers.parquet`` has ``answers-logs``."""
    return out.with_name(f"{out.stem}-logs")


async def draw(
    engine: SampleSource,
    prompts: PromptSet,
    n: int,
    sampling: Sampling,
    report: Callable[[int], None],
    kept: Journal | None = None,
    agents: AgentRunner | None = None,
) -> list[list[Generated]]:
    """Samples ``n`` responses to each of ``prompts``, in order.

    report: called with each response's token count.  kept: those that are there already, and where new ones are noted.
    agents: run the rows that ask for an agent; None: there are none.
    """
    kept = kept or Journal()
    rows = [*rows_of(prompts)]
    places = {row.id: place for place, row in enumerate(rows)}
    assert len(places) == len(rows), "ids name rows"
    by_row: list[dict[int, Generated]] = [{} for _ in rows]
    segments = [prompt_segment(row) for row in rows]
    for entry in kept.entries:
        by_row[places[entry["prompt"]]][entry["index"]] = _generated(entry["response"])
        report(0)
    engine = SeeingSource(engine, {row.id: row for row in rows}, PictureShelf([prompts]))
    asked = requests_of([Prompt(id=row.id, tokens=row.tokens) for row in rows], n)
    requests = [each for each in asked if each.index not in by_row[places[each.prompt.id]]]

    def keep(episode: Episode) -> None:
        made = generated(episode)
        by_row[episode.group][episode.index] = made
        kept.append({"prompt": episode.prompt_id, "index": episode.index, "response": asdict(made)})
        report(made.num_tokens)

    room = asyncio.Semaphore(MAX_EPISODES)

    async def run_agent(runner: AgentRunner, request: Request) -> None:
        async with room:
            place = places[request.prompt.id]
            keep(await runner.run(engine, rows[place], request.prompt.id, place, request.index, sampling))

    alone = []
    try:
        async with asyncio.TaskGroup() as running:  # an error of one ends the others
            for each in requests:
                if agents is not None and agents.runs(rows[places[each.prompt.id]]):
                    running.create_task(run_agent(agents, each))
                else:
                    alone.append(each)
            async for sample in engine.generate(alone, sampling):
                place = places[sample.prompt_id]
                keep(single_turn(rows[place], segments[place], sample, place))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [[group[index] for index in range(n)] for group in by_row]


def _generated(values: dict[str, Any]) -> Generated:
    """A response as the journal has it."""
    agent = values["agent"] and AgentRecord(**values["agent"])
    return Generated(**values | {"turns": tuple(values["turns"]), "agent": agent})


def generated(episode: Episode) -> Generated:
    """The row of ``episode`` in the file: its texts and lengths, without tokens."""
    turns = [
        {
            "role": ROLES[segment.author],
            "content": segment.text,
            "num_tokens": len(segment.tokens),
            "trained": segment.trained,
            "reward": segment.reward,
        }
        for segment in episode.segments[1:]
    ]
    did = episode.agent
    return Generated(
        text=episode.response,
        num_tokens=episode.num_response_tokens,
        finish=episode.end.value,
        turns=() if episode.is_single_turn and not episode.turn_rewards else tuple(turns),
        agent=None if did is None else _record(did),
    )


def _record(counts: AgentCounts) -> AgentRecord:
    return AgentRecord(**{each.name: getattr(counts, each.name) for each in fields(AgentRecord)})
