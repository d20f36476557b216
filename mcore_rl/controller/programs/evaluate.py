"""``mcore-rl evaluate``: responses that were generated before, graded and counted by data source.

Needs neither a model nor Ray, unless a reward model scores; the numbers are ``rewards.estimates``'.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from mcore_rl.config.bounds import file_violations
from mcore_rl.config.compose import as_dict
from mcore_rl.config.evaluate import EvaluateConfig, evaluate_violations
from mcore_rl.config.reward import Style
from mcore_rl.config.reward_model import style_violations
from mcore_rl.config.trainer import RayInitConfig
from mcore_rl.controller.lifecycle.judging import check_judge, opened_judge, opened_scorer
from mcore_rl.controller.lifecycle.messages import outcome
from mcore_rl.data.responses import ResponseRow, ResponseSet, agent_summary, agents_line, write_pairs
from mcore_rl.data.rows import MESSAGES, named
from mcore_rl.ground.errors import Violation, refuse_if_any
from mcore_rl.rewards.estimates import CONFIDENCE, MeanEstimate, interval, majority_at_k, pass_at_k
from mcore_rl.rewards.llm_judge import Judge
from mcore_rl.rewards.score import ERROR_KINDS, RewardRequest, Score
from mcore_rl.rewards.scorer import Scorer
from mcore_rl.tracking.atomic import replaced
from mcore_rl.tracking.journal import Journal, journal, sum_of
from mcore_rl.tracking.progress import WorkProgress

if TYPE_CHECKING:
    from mcore_rl.controller.step.reward_model import RewardModel

IN_FLIGHT = 256  # responses that wait for a grading process
LOST = "lost"  # kind of error: the episode's environment or engine failed, and no grade could be the model's
UNKNOWN_CORRECT = "the grader does not say what is right; a custom function says it as acc in its dict"
UNKNOWN_ANSWER = "the grader names no answers to vote on; a custom function names them as pred in its dict"


@dataclass(frozen=True, kw_only=True)
class Graded:
    """row: a row of the file, without its texts.  scores: one per response."""

    row: ResponseRow
    scores: tuple[Score, ...]


@dataclass(frozen=True, kw_only=True)
class SourceReport:
    """The results of one data source.

    num_prompts, num_responses: counts.
    num_samples: responses of a prompt, fewest and most.
    num_tokens: of a response, mean; None where the file does not say.
    truncated: share of responses that were cut off; None where the file does not say.
    errors: number of responses that could not be graded, by kind.
    example: error of the first of them; None where all were graded.
    metrics: ``score``, ``accuracy``, ``pass@k``, ``maj@k``.
    missing: why a metric is not there, by its name.
    agents: what the agents did, as ``agent_summary``; {} where there were none.
    """

    num_prompts: int
    num_responses: int
    num_samples: tuple[int, int]
    num_tokens: float | None
    truncated: float | None
    errors: dict[str, int]
    example: str | None
    metrics: dict[str, MeanEstimate]
    missing: dict[str, str]
    agents: dict[str, float] = field(default_factory=dict)


async def run_evaluate(config: EvaluateConfig) -> int:
    """Grade, show a table, write ``config.out``; returns the exit code 0.

    Killed, the same command goes on with the scores that are there, and writes the same file.

    Raises ConfigError and kin with everything that keeps it from starting.
    """
    rows = read_responses(config)
    async with AsyncExitStack() as stack:
        kept = Journal()
        if config.out is not None:
            out = Path(config.out).expanduser()
            kept = stack.enter_context(journal(out, work_of(config), afresh=config.overwrite))
        scorer = stack.enter_context(_scorer(config, rows))
        await check_judge(config.reward, rows)
        graders = Graders(
            scorer,
            await _reward_model(config, stack),
            await stack.enter_async_context(opened_judge(config.reward, None)),
        )
        work = stack.enter_context(WorkProgress("grading", sum(rows.counts), "responses"))
        graded = await grade_all(graders, rows, config.max_response_length or 0, lambda: work.advance(1), kept)
        reports = reports_of(graded, config.k, has_lengths=rows.has_lengths, has_finish=rows.has_finish)
        for source, report in reports.items():
            Console().print(table_of(source, report))
            for line in _remarks(report):
                outcome(line)
        if graders.judge is not None:
            told = ", ".join(f"{name.partition('/')[2]} {value:,.6g}" for name, value in graders.judge.take().items())
            outcome(f"judge: {told}")
        if config.out is not None:
            with replaced(Path(config.out).expanduser()) as new:
                new.write_text(json.dumps(as_json(config.path, reports), indent=2, allow_nan=False) + "\n")
            outcome(f"numbers: {config.out}")
        if config.pairs is not None:
            scores = [[None if score.error else score.total for score in each.scores] for each in graded]
            said = write_pairs(Path(config.pairs).expanduser(), zip(rows, scores, strict=True))
            outcome(said)
    return 0


def check_evaluate(config: EvaluateConfig) -> int:
    """Read and check all that ``run_evaluate`` needs, and grade nothing; returns the exit code 0."""
    rows = read_responses(config)
    with _scorer(config, rows):
        asyncio.run(check_judge(config.reward, rows))
        outcome(f"nothing is wrong: {sum(rows.counts):,} responses. Nothing was graded")
    return 0


def read_responses(config: EvaluateConfig) -> ResponseSet:
    """The responses to grade.  Raises ConfigError and kin with everything that keeps them from being graded."""
    refuse_if_any([*evaluate_violations(config), *file_violations(config)])
    rows = ResponseSet.load(config.path, config.prompt_key, config.response_key)
    refuse_if_any(_row_violations(config, rows))
    return rows


def _scorer(config: EvaluateConfig, rows: ResponseSet) -> AbstractContextManager[Scorer]:
    sources = [source for source, style in zip(rows.data_sources, rows.styles, strict=True) if style is Style.rule]
    return opened_scorer(config.reward, config.custom_reward_function, sources, rows, outcome, refuse=False)


def work_of(config: EvaluateConfig) -> dict[str, Any]:
    """What the scores follow from: the settings, the responses, the user's function."""
    reward = replace(config.reward, judge=config.reward.judge.scoring)
    settings = as_dict(
        replace(config, out=None, pairs=None, overwrite=False, k=[], ray_init=RayInitConfig(), reward=reward)
    )
    own = config.custom_reward_function.path
    return {"settings": settings, "responses": sum_of(config.path), "function": own and sum_of(own)}


@dataclass(frozen=True)
class Graders:
    """Who grades the rows of each style: graders or the user's function, the reward model, the judge."""

    scorer: Scorer
    reward_model: RewardModel | None = None
    judge: Judge | None = None

    def of(self, row: ResponseRow) -> Scorer | RewardModel | Judge:
        """Who grades ``row``."""
        by_style: dict[Style, Scorer | RewardModel | Judge | None] = {
            Style.rule: self.scorer,
            Style.model: self.reward_model,
            Style.judge: self.judge,
        }
        return by_style[row.style] or self.scorer


async def grade_all(
    graders: Graders,
    rows: ResponseSet,
    max_tokens: int,
    report: Callable[[], None],
    kept: Journal | None = None,
) -> list[Graded]:
    """Grades every response; returns the scores in file order.

    ``IN_FLIGHT`` responses are graded at the same time, so that no grading process waits.  A text is read when it is
    its turn, and dropped afterwards.

    max_tokens: the limit of a response when it was generated; 0: unknown.
    report: called after each response.
    kept: the scores that are there already, and where new ones are noted.
    """
    kept = kept or Journal()
    there = {(entry["row"], entry["index"]): _score(entry["score"]) for entry in kept.entries}
    graded: list[tuple[ResponseRow, list[Score | None]]] = []

    def requests() -> Iterator[tuple[ResponseRow, list[Score | None], int]]:
        for row in rows:
            scores: list[Score | None] = [None] * len(row.responses)
            graded.append((replace(row, responses=(), columns={}, extra_info={}, messages=[], turns=()), scores))
            for index in range(len(scores)):
                if (row.id, index) in there:
                    scores[index] = there[row.id, index]
                    report()
                else:
                    yield row, scores, index

    waiting = requests()

    async def serve() -> None:
        for row, scores, index in waiting:  # all servers draw from the one
            if lost := row.lost[index]:
                score = Score(0.0, error=f"{LOST}: the episode ended by {lost}")
            else:
                score = await graders.of(row).score(request_of(row, index, max_tokens))
                score = replace(score, turn_rewards=(*score.turn_rewards, *row.turn_rewards[index]))
            scores[index] = score
            kept.append({"row": row.id, "index": index, "score": asdict(score)})
            report()

    servers = [asyncio.create_task(serve()) for _ in range(IN_FLIGHT)]
    try:
        await asyncio.gather(*servers)
    finally:
        for server in servers:
            server.cancel()
    return [Graded(row=row, scores=tuple(each for each in scores if each is not None)) for row, scores in graded]


def _score(values: dict[str, Any]) -> Score:
    """A score as the journal has it."""
    return Score(**values | {"turn_rewards": tuple(values["turn_rewards"])})


async def _reward_model(config: EvaluateConfig, stack: AsyncExitStack) -> RewardModel | None:
    """Starts the reward model, which runs until ``stack`` is closed; None if it is not enabled."""
    if not config.reward_model.enable:
        return None
    # torch, Ray and all, which nothing else here needs
    from mcore_rl.controller.lifecycle.fixed_engines import open_alone
    from mcore_rl.controller.programs.generate import logs_beside

    return await open_alone(config, logs_beside(Path(config.path).expanduser().resolve()), stack)


def request_of(row: ResponseRow, index: int, max_tokens: int) -> RewardRequest:
    """The request that a grader gets for a response, the same as in training."""
    turns = row.turns[index]
    return RewardRequest(
        key=(row.id, index),
        data_source=row.data_source,
        response=row.responses[index],
        ground_truth=row.ground_truth,
        extra_info={**row.columns, **row.extra_info},
        num_tokens=row.num_tokens[index],
        max_tokens=max_tokens,
        truncated=row.truncated[index],
        messages=[*row.messages, *turns] if row.messages else (),
        num_turns=sum(turn["role"] == "assistant" for turn in turns),
    )


def reports_of(
    graded: Sequence[Graded], k: Sequence[int], *, has_lengths: bool, has_finish: bool
) -> dict[str, SourceReport]:
    """A report for each data source, in the order in which they appear.

    k: of ``pass@k`` and ``maj@k``; empty is ``default_k`` of the source.
    has_lengths, has_finish: whether the file says how long responses are, and whether they were cut off.
    """
    sources: dict[str, list[Graded]] = {}
    for each in graded:
        sources.setdefault(each.row.data_source, []).append(each)
    return {source: _report(graded, k, has_lengths, has_finish) for source, graded in sources.items()}


def default_k(fewest: int) -> list[int]:
    """1, 2, 4, ... below ``fewest``, and ``fewest``."""
    powers = [2**power for power in range(fewest.bit_length()) if 2**power < fewest]
    return [*powers, fewest]


def _report(graded: Sequence[Graded], k: Sequence[int], has_lengths: bool, has_finish: bool) -> SourceReport:
    scores = [score for each in graded for score in each.scores]
    counts = [len(each.scores) for each in graded]
    errors = [score.error for score in scores if score.error is not None]
    kinds = Counter(error.partition(":")[0] for error in errors)
    metrics = {"score": interval([fmean(score.total for score in each.scores) for each in graded])}
    missing: dict[str, str] = {}
    wanted = k or default_k(min(counts))
    if any(score.correct is not None for score in scores):
        # What could not be graded is not known to be right: it counts as wrong, here and below.
        metrics["accuracy"] = interval([fmean(score.correct or 0.0 for score in each.scores) for each in graded])
        right = [[(score.correct or 0.0) >= 1.0 for score in each.scores] for each in graded]
        for size in wanted:
            metrics[f"pass@{size}"] = interval([pass_at_k(len(each), sum(each), size) for each in right])
        if any(score.answer is not None for score in scores):
            answers = [[score.answer for score in each.scores] for each in graded]
            for size in (size for size in wanted if size > 1):  # one vote elects itself
                votes = [majority_at_k(a, r, size) for a, r in zip(answers, right, strict=True)]
                metrics[f"maj@{size}"] = interval(votes)
        else:
            missing["maj@k"] = UNKNOWN_ANSWER
    else:
        missing |= dict.fromkeys(("accuracy", "pass@k", "maj@k"), UNKNOWN_CORRECT)
    lengths = [tokens for each in graded for tokens in each.row.num_tokens]
    cut = [cut for each in graded for cut in each.row.truncated]
    return SourceReport(
        num_prompts=len(graded),
        num_responses=len(scores),
        num_samples=(min(counts), max(counts)),
        num_tokens=fmean(lengths) if has_lengths else None,
        truncated=fmean(cut) if has_finish else None,
        errors={kind: kinds[kind] for kind in (*ERROR_KINDS, LOST)},
        example=errors[0] if errors else None,
        metrics=metrics,
        missing=missing,
        agents=agent_summary([agent for each in graded for agent in each.row.agents]),
    )


def table_of(source: str, report: SourceReport) -> Table:
    """``report`` as a table with a row for each metric."""
    title = f"{source}: {report.num_prompts:,} prompts, {report.num_responses:,} responses"
    table = Table("metric", "value", f"{100 * CONFIDENCE:g}% interval", "method", title=title, title_justify="left")
    for column in table.columns[1:3]:
        column.justify = "right"
    for name, estimate in report.metrics.items():
        between = " to ".join(_number(name, edge) for edge in (estimate.low, estimate.high))
        table.add_row(name, _number(name, estimate.value), between, estimate.method)
    return table


def as_json(path: str, reports: dict[str, SourceReport]) -> dict[str, Any]:
    """What ``config.out`` holds."""
    return {"path": path, "confidence": CONFIDENCE, "data_sources": {name: asdict(r) for name, r in reports.items()}}


def _number(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if name == "score" else f"{100 * value:.1f}%"


def _remarks(report: SourceReport) -> list[str]:
    """Lines below the table: missing metrics, lengths, errors."""
    lines = [f"no {name}: {why}" for name, why in report.missing.items()]
    if report.num_tokens is not None:
        lines.append(f"{report.num_tokens:.1f} tokens a response in the mean")
    if report.truncated is not None:
        lines.append(f"{100 * report.truncated:.1f}% of responses cut off at their limit")
    if report.agents:
        lines.append(agents_line(report.agents))
    if report.example is not None:
        kinds = ", ".join(f"{count} {kind}" for kind, count in report.errors.items() if count)
        lines.append(f"not graded, and counted as wrong: {kinds}; the first: {report.example}")
    return lines


def _row_violations(config: EvaluateConfig, rows: ResponseSet) -> list[Violation]:
    fewest = min(rows.counts)
    ids = {style: rows.ids_of(style) for style in (Style.model, Style.judge)}
    violations = style_violations(config.reward_model, config.reward.judge, config.custom_reward_function, ids)
    if config.pairs is not None and rows.without_messages:
        problem = (
            f"a pair begins with its prompt, and {config.prompt_key} is no messages in {named(rows.without_messages)}"
        )
        remedy = f"Write {MESSAGES}, or name the column that has them as prompt_key"
        violations.append(Violation("pairs", config.pairs, problem, remedy))
    if config.k and max(config.k) > fewest:
        problem = f"{max(config.k)} of {fewest} responses cannot be drawn: so many has the prompt with the fewest"
        violations.append(Violation("k", config.k, problem, f"Write up to {fewest}, or generate more (rollout.n)"))
    if config.reward.overlong.enable and not rows.has_lengths:
        problem = "the file does not say how long its responses are (response_num_tokens)"
        violations.append(
            Violation("reward.overlong.enable", True, problem, "Generate it again, or write enable=false")
        )
    return violations
