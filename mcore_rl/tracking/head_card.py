"""The head of a report: which model, by what, on what, for how long, at what cost, and with what result."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from math import prod
from typing import Any

from mcore_rl.config.algorithm_registry import algorithms
from mcore_rl.tracking.console import duration, number, spent
from mcore_rl.tracking.page import text
from mcore_rl.tracking.run_files import RecordedRun, setting
from mcore_rl.tracking.run_owner import OWNER, Owner, read_owner
from mcore_rl.tracking.verdict import gain

# What runs that draw nothing are judged by, the first that there is: a share with its title and note, or a loss.
SHARES = {
    "prefer/val_accuracy": ("Held-out pairs", "the preferred answer has the higher reward"),
    "reward/val_accuracy": ("Held-out pairs or outcomes", "scores agree with the labels"),
}
LOSSES = {
    "sft/val_loss": "nats per trained token",
    "prefer/val_loss": "a pair or answer",
    "reward/val_loss": "a pair or answer",
}
RECENT = 20  # steps, of which the mean tells how long the rest will take


@dataclass(frozen=True)
class Fact:
    """One tile.  value: in large; notes: below it.  kind: "good", "bad" or "".  wide: the result, which comes first."""

    name: str
    value: str
    notes: Sequence[str] = ()
    kind: str = ""
    wide: bool = False


def head_card(run: RecordedRun) -> str:
    """The HTML of the title, the state and the tiles."""
    state, kind = state_of(run)
    tiles = "".join(_tile(fact) for fact in facts(run))
    title = f'<div class="title"><h1>{text(run.name)}</h1><span class="badge {kind}">{text(state)}</span></div>'
    return f'{title}<dl class="facts">{tiles}</dl>'


def facts(run: RecordedRun) -> list[Fact]:
    """The tiles of ``run``; what its files do not tell is left out."""
    config = run.settings
    made = [_result(run), _model(run, config), _algorithm(config), _data(config), _hardware(run, config), *_time(run)]
    return [fact for fact in made if fact is not None and fact.value]


def _tile(fact: Fact) -> str:
    lines = "".join(f"<dd>{text(line)}</dd>" for line in (fact.value, *fact.notes) if line)
    kinds = " ".join(filter(None, [fact.kind, "result" if fact.wide else ""]))
    return f'<div class="{kinds}"><dt>{text(fact.name)}</dt>{lines}</div>'


def state_of(run: RecordedRun) -> tuple[str, str]:
    """The state of the run in words, and its class of the style sheet."""
    if run.complete:
        return "finished", "good"
    owner = read_owner(run.path / OWNER)
    us = Owner()
    if owner is None or (owner.machine == us.machine and owner.pid == os.getpid()):
        return "ended before its last step", ""
    lives = owner.lives(us) if owner.machine == us.machine else None
    if lives is None:
        return f"belongs to a program on {owner.host}", ""
    return ("running", "good") if lives else ("killed", "bad")


def _result(run: RecordedRun) -> Fact | None:
    """The verdict in a number: of the first data source, or of the validation loss."""
    for source, validations in run.accuracies.items():
        first = validations[0]
        last = validations[-1]
        if len(validations) == 1:
            return Fact("Validated once", f"{last.mean:.1%}", [source], wide=True)
        change = gain(first, last)
        sure = "more than chance" if change.significant else "may be chance"
        notes = [f"{first.mean:.1%} to {last.mean:.1%}, {source}; {sure}"]
        kind = ("good" if change.points > 0 else "bad") if change.significant and run.complete else ""
        name = "Validation" if run.complete else "Validation so far"
        return Fact(name, f"{100 * change.points:+.1f} points", notes, kind, wide=True)
    for key, (title, note) in SHARES.items():
        shares = [value for _, value in run.numbers(key)]
        if not shares:
            continue
        kind = ("good" if shares[-1] > shares[0] else "bad") if len(shares) > 1 and run.complete else ""
        notes = [f"from {shares[0]:.1%}: {note}"]
        return Fact(title, f"{shares[-1]:.1%}", notes, kind, wide=True)
    losses = [value for key in LOSSES for _, value in run.numbers(key)]
    if not losses:
        return None
    unit = next(unit for key, unit in LOSSES.items() if run.values(key))
    kind = ("good" if losses[-1] < losses[0] else "bad") if len(losses) > 1 and run.complete else ""
    notes = [f"from {number(losses[0])} {unit}"]
    return Fact("Validation loss", number(losses[-1]), notes, kind, wide=True)


def _model(run: RecordedRun, config: Mapping[str, Any]) -> Fact | None:
    path = str(setting(config, "model.path") or "")
    count = run.plan.get("num_parameters")
    size = f"{count / 1e9:.1f}B" if isinstance(count, int) and count >= 1e8 else f"{(count or 0) / 1e6:.2f}M"
    notes = [f"{size} parameters"] if count else []
    if title := setting(config, "recipe.title"):
        notes.append(f"recipe: {title}")
    parts = path.rstrip("/").split("/")
    exported = parts[-2:-1] == ["hf"]  # of another run, whose folder is before
    return Fact("Model", "/".join(parts[-3:] if exported else parts[-2:]), notes)


def _offline(config: Mapping[str, Any], notes: list[str]) -> str:
    """What a run without an estimator trains by; adds its settings to ``notes``."""
    preference = setting(config, "actor.preference.loss")
    reward = setting(config, "actor.reward.loss")
    if reward is not None:
        return f"Reward model by {reward}"
    if preference is None:
        return "Supervised fine-tuning"
    if (beta := setting(config, "actor.preference.beta")) is not None:
        notes.append(f"beta {beta}")
    return f"Preferences by {preference}"


def _algorithm(config: Mapping[str, Any]) -> Fact | None:
    estimator = setting(config, "algorithm.adv_estimator")
    loss = setting(config, "actor.loss_mode")
    rate = setting(config, "actor.optim.lr")
    notes = [] if rate is None else [f"learning rate {float(rate):.3g}"] if isinstance(rate, int | float) else []
    if estimator is None:
        return Fact("Algorithm", _offline(config, notes), notes) if config else None
    notes.insert(0, f"advantages {estimator}, loss {loss}")
    if setting(config, "algorithm.use_kl_in_reward"):
        notes.append(f"KL in the reward, {setting(config, 'algorithm.kl_ctrl.kl_coef')}")
    if setting(config, "actor.use_kl_loss"):
        notes.append(f"KL in the loss, {setting(config, 'actor.kl_loss_coef')}")
    if coef := setting(config, "algorithm.distill.coef"):
        paths = [setting(config, "teacher.path"), *(setting(config, "teacher.by_source") or {}).values()]
        named = ["/".join(str(each).rstrip("/").split("/")[-2:]) for each in paths if each]
        notes.append(f"teacher {', '.join(dict.fromkeys(named))}, {coef}")
    return Fact("Algorithm", title_of(config) or str(estimator), notes)


def title_of(config: Mapping[str, Any]) -> str:
    """The algorithm whose estimator and loss ``config`` has, and most of whose other keys; "" if there is none."""
    parts = ("algorithm.adv_estimator", "actor.loss_mode")
    best = (1.0, 0)
    title = ""
    for each in algorithms().values():
        wanted = {key: _plain(setting.value) for key, setting in each.all_settings().items()}
        if any(setting(config, key) != wanted[key] for key in parts):
            continue
        fixed = {key: value for key, value in wanted.items() if not (isinstance(value, str) and "${" in value)}
        missed = sum(setting(config, key) != value for key, value in fixed.items())
        if (rank := (missed / len(fixed), -len(fixed))) < best:
            best = rank
            title = each.title
    return title


def _data(config: Mapping[str, Any]) -> Fact | None:
    train, val = (_names(setting(config, f"data.{part}_files")) for part in ("train", "val"))
    size = setting(config, "data.train_batch_size")
    draws = setting(config, "rollout.n")
    notes = [f"validated on {val}" if val else ""]
    if size is not None:
        notes.append(f"{size} prompts a step, {draws} responses each" if draws else f"{size} conversations a step")
    return Fact("Data", train, notes)


def _hardware(run: RecordedRun, config: Mapping[str, Any]) -> Fact | None:
    machine = run.environment.get("hardware")
    if not isinstance(machine, dict):
        return None
    devices = num_devices(run)
    nodes = run.plan.get("num_nodes") or setting(config, "trainer.nnodes") or 1
    where = f"{nodes} node" + ("s" if nodes != 1 else "")
    layout = _short(str(run.plan.get("layout") or ""))
    if on_accelerator(run):
        return Fact("Hardware", f"{devices} x {machine.get('device_name') or 'accelerators'}", [where, layout])
    cores = f"{machine.get('cpus', '?')} cores, {machine.get('memory_gib', '?')} GiB"
    return Fact("Hardware", str(machine.get("processor") or "CPU"), [f"{cores}, {where}", layout])


def _short(layout: str) -> str:
    """``layout`` without what is 1."""
    parts = (part.split(" ", 1) if " " in part else ["", part] for part in layout.split("; "))
    kept = ((name, ",".join(size for size in sizes.split(",") if not size.endswith("=1"))) for name, sizes in parts)
    return "; ".join(f"{name} {sizes}".strip() for name, sizes in kept if sizes)


def _time(run: RecordedRun) -> list[Fact]:
    times = [value or 0.0 for _, value in run.values("time/step")]
    trained = [value or 0.0 for step, value in run.values("time/step") if step > 0]  # 0 is a validation
    reached = run.last_step or 0
    total = run.total_steps
    if not times:
        return []
    notes = [f"{total} steps, {spent(sum(trained) / len(trained))} each"] if run.complete and total and trained else []
    if not run.complete and trained:
        a_step = sum(trained[-RECENT:]) / len(trained[-RECENT:])
        notes += [f"about {duration((total - reached) * a_step)} left"] if total is not None else []
        notes.append(f"{spent(a_step)} a step of late")
    notes.append(_started(run))
    hours = sum(times) / 3600
    time = Fact("Time in steps", spent(sum(times)), notes)
    if not on_accelerator(run):
        return [time, Fact("Cost", "no GPU hours", [f"{hours:.2g} h of this machine's CPU"])]
    devices = num_devices(run)
    return [time, Fact("Cost", f"{_hours(hours * devices)} GPU hours", [f"{devices} devices, while in steps"])]


def _started(run: RecordedRun) -> str:
    """When the run last started, to the minute."""
    try:
        started = datetime.fromisoformat(str(run.environment.get("started")))
    except ValueError:
        return ""
    return f"started {started:%Y-%m-%d %H:%M} {started.tzname() or ''}".rstrip()


def _hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"


def on_accelerator(run: RecordedRun) -> bool:
    """Whether the run's devices are accelerators; if it did not record that, whether torch was no CPU build."""
    machine, versions = (run.environment.get(key) or {} for key in ("hardware", "versions"))
    if isinstance(machine, dict) and machine.get("device"):
        return bool(machine["device"] != "cpu")
    return not str(versions.get("torch", "+cpu") if isinstance(versions, dict) else "+cpu").endswith("+cpu")


def num_devices(run: RecordedRun) -> int:
    """Devices of the whole run, those of a separate rollout included."""
    planned = run.plan.get("num_gpus")
    if isinstance(planned, int):
        return planned
    sizes = (setting(run.settings, f"trainer.{name}") for name in ("nnodes", "n_gpus_per_node"))
    return prod(int(size or 1) for size in sizes)


def _plain(value: object) -> object:
    return value.value if isinstance(value, Enum) else value


def _names(files: object) -> str:
    """The files' last folder and name each."""
    listed = files if isinstance(files, list) else [files] if files else []
    return ", ".join("/".join(str(each).split("/")[-2:]) for each in listed)
