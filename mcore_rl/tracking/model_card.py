"""The model card of an export: what it was trained from, with what, how, and what came of it.

Written from the files of the run alone.  It names no path of the machine: of files it has the Hub ids, else the names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

import mcore_rl
from mcore_rl.hub.names import DATASET, MODEL, hub_name, named
from mcore_rl.tracking.run_files import RecordedRun, read_run, setting
from mcore_rl.tracking.verdict import Accuracy, best, gain

BARS = "▁▂▃▄▅▆▇█"
MAX_ROWS = 12  # of the curve
# Keys of the run that say how it was trained, in the order of the card.
SETTINGS = (
    "algorithm.adv_estimator",
    "actor.loss_mode",
    "data.train_batch_size",
    "rollout.n",
    "rollout.temperature",
    "data.max_prompt_length",
    "data.max_response_length",
    "actor.ppo_mini_batch_size",
    "actor.ppo_epochs",
    "actor.optim.lr",
    "actor.use_kl_loss",
    "actor.kl_loss_coef",
    "algorithm.use_kl_in_reward",
    "data.seed",
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "actor.precision",
)


def model_card(title: str, source: Path) -> str:
    """The text of README.md of an export called ``title``.  source: the checkpoint, which may be one of a run."""
    run = _run_of(source.resolve())
    config = run.settings if run else {}
    head = yaml.safe_dump(dict(_front(config)), sort_keys=False, allow_unicode=True)
    lines = [f"---\n{head}---\n", f"# {title.partition('/')[2]}\n"]
    lines.append(f"Made with mcore_rl {mcore_rl.__version__}, on Megatron-core.\n")
    if run is not None:
        lines += [*_origin(config, source), *_verdict(run), *_curve(run), *_settings(config), *_versions(run)]
    return "\n".join(lines)


def _run_of(source: Path) -> RecordedRun | None:
    """The run whose ``checkpoints/step_N``, a role in it, or ``hf/NAME`` this is; None if it is of no run."""
    within = next((each for each in (source, source.parent) if each.parent.name in ("checkpoints", "hf")), None)
    if within is None or not (within.parents[1] / "metrics.jsonl").is_file():
        return None
    return read_run(within.parents[1])


def _front(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What the Hub reads.  No licence: it is the base model's, which is not known here."""
    yield "library_name", "transformers"
    yield "pipeline_tag", "text-generation"
    base = hub_name(str(setting(config, "model.path") or ""), MODEL)
    if base is not None:
        yield "base_model", base.name
    files = [hub_name(str(each), DATASET) for each in setting(config, "data.train_files") or []]
    if ids := list(dict.fromkeys(each.name for each in files if each is not None)):
        yield "datasets", ids
    estimator = setting(config, "algorithm.adv_estimator")
    yield "tags", ["mcore_rl", *(["reinforcement-learning", str(estimator)] if estimator else [])]


def _origin(config: Mapping[str, Any], source: Path) -> Iterator[str]:
    name = setting(config, "recipe.title") or setting(config, "trainer.experiment_name") or "a run without a name"
    data = {key: [_shown(each) for each in setting(config, f"data.{key}_files") or []] for key in ("train", "val")}
    yield "| | |\n|---|---|"
    yield f"| base model | {_shown(setting(config, 'model.path'))} |"
    yield f"| recipe | {_cell(name)} |"
    yield f"| trained on | {', '.join(data['train']) or 'nothing'} |"
    yield f"| validated on | {', '.join(data['val']) or 'nothing'} |"
    yield f"| checkpoint | {_cell(source.name)} |\n"


def _verdict(run: RecordedRun) -> Iterator[str]:
    yield "## What was learned\n"
    if not run.accuracies:
        yield "There are no validation samples, and so no verdict.\n"
    for name, validations in run.accuracies.items():
        first = validations[0]
        last = validations[-1]
        if len(validations) < 2:
            yield f"- {_cell(name)}: {first.mean:.1%} after step {first.step}, validated once: no verdict."
            continue
        change = gain(first, last)
        top = best(validations)
        sure = "more than chance" if change.significant else "which may be chance"
        yield (
            f"- {_cell(name)}: {first.mean:.1%} after step {first.step}, {last.mean:.1%} after step {last.step}: "
            f"{100 * change.points:+.1f} points, {sure} ({change.basis}). "
            f"Best: {top.mean:.1%} after step {top.step}."
        )
    if not run.complete:
        yield f"\nThe run has not been recorded to its end: {run.last_step} of {run.total_steps} steps."
    yield ""


def _curve(run: RecordedRun) -> Iterator[str]:
    for name, validations in run.accuracies.items():
        if len(validations) < 2:
            continue
        yield f"Held-out accuracy of {_cell(name)}, `{_bars(validations)}`:\n"
        yield "| step | accuracy | 95 % |\n|---|---|---|"
        for each in _some(validations):
            low, high = each.interval
            yield f"| {each.step} | {each.mean:.1%} | {low:.1%} to {high:.1%} |"
        yield ""


def _bars(validations: list[Accuracy]) -> str:
    """Of the accuracies between 0 and 1."""
    return "".join(BARS[min(int(each.mean * len(BARS)), len(BARS) - 1)] for each in validations)


def _some(validations: list[Accuracy]) -> list[Accuracy]:
    """At most ``MAX_ROWS`` at even distances, the first and the last among them."""
    last = len(validations) - 1
    rows = min(len(validations), MAX_ROWS)
    return [validations[round(last * row / (rows - 1))] for row in range(rows)]


def _settings(config: Mapping[str, Any]) -> Iterator[str]:
    there = [(key, value) for key in SETTINGS if (value := setting(config, key)) is not None]
    if there:
        yield "## How it was trained\n"
        yield "| key | value |\n|---|---|"
        yield from (f"| `{key}` | {_cell(value)} |" for key, value in there)
        yield ""


def _versions(run: RecordedRun) -> Iterator[str]:
    versions = run.environment.get("versions")
    if isinstance(versions, Mapping):
        yield "Versions: " + ", ".join(f"{_cell(name)} {_cell(version)}" for name, version in versions.items()) + ".\n"


def _shown(path: Any) -> str:
    """A model or a file: its Hub id, else its name alone."""
    text = named(str(path or "unknown"))
    name = hub_name(text, DATASET) or hub_name(text, MODEL)
    return _cell(str(name) if name and name.revision else Path(text).name)


def _cell(value: Any) -> str:
    """``value`` in a table of Markdown."""
    return str(value).replace("\n", " ").replace("|", "\\|").replace("<", "&lt;")
