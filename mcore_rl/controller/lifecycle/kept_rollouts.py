"""Decides whether a resumed run goes on with the rollouts that its checkpoint has, or draws their prompts again.

It goes on with them in the mode in which they were drawn and with the settings that they were drawn and graded with,
whatever its layout and the number of its engines.  Else a note says why not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from mcore_rl.config.asynchrony import trains_stale
from mcore_rl.config.data import ImagesConfig
from mcore_rl.config.roles import RouterReplay
from mcore_rl.config.run import RunConfig
from mcore_rl.config.trainer import Mode
from mcore_rl.controller.lifecycle.messages import note
from mcore_rl.controller.lifecycle.resume_check import JUDGES, Identity
from mcore_rl.controller.rollouts.drawn_file import DrawnGroup
from mcore_rl.controller.rollouts.kept_draws import FILE, KeptDraws, read_kept
from mcore_rl.data.prompts import PromptRow, PromptSet
from mcore_rl.ground.errors import CheckpointError
from mcore_rl.rollout.episodes import VersionSpan
from mcore_rl.tracking.run_directory import plain

# Of the group ``rollout``: what is drawn.  Its other keys say with what.
DRAWN = (
    *("n", "temperature", "top_p", "top_k", "stop", "stop_token_ids", "ignore_eos", "seed"),
    *("max_prompt_length", "max_response_length", "agent"),
)


def draw_settings(config: RunConfig, identity: Identity) -> dict[str, Any]:
    """The settings, and checksums of files, on which it depends what is drawn and how it is graded: plain values."""
    judges = ("reward", "custom_reward_function", "reward_model")
    settings: dict[str, Any] = {f"rollout.{name}": getattr(config.rollout, name) for name in DRAWN}
    settings |= {f"{name}.{key}": value for name in judges for key, value in plain(getattr(config, name)).items()}
    settings["reward.judge"] = plain(config.reward.judge.scoring)
    settings |= {f"the files of {key}": identity.contents.get(key) for key in JUDGES}
    settings["custom_reward_function.path"] = config.custom_reward_function.path is not None  # the file may move
    settings["reward_model.model"] = None  # as above: its files are compared
    settings["algorithm.adv_estimator (greedy samples)"] = config.needs_greedy
    settings["actor.router_replay=r3"] = config.actor.router_replay is RouterReplay.r3
    if config.sees_pictures:
        settings |= {f"data.{each.name}": getattr(config.data, each.name) for each in fields(ImagesConfig)}
    if config.trainer.mode is Mode.one_step_off:
        settings["data.train_batch_size"] = config.data.train_batch_size
    written: dict[str, Any] = json.loads(json.dumps(plain(settings)))
    return written


def kept_rollouts(
    checkpoint: Path, step: int, config: RunConfig, settings: dict[str, Any], train: PromptSet
) -> KeptDraws | None:
    """The rollouts in ``checkpoint`` to go on with; None: there are none, or they are drawn again, as a note says.

    step: the last complete one.  settings: ``draw_settings`` of ``config``.  CheckpointError: they cannot be read.
    """

    def row_of(number: int, epoch: int) -> PromptRow:
        return replace(train[number], epoch=epoch)

    if (drawn := read_kept(checkpoint, row_of)) is None:
        return None
    kept, before = drawn
    again = f"{checkpoint / FILE} has rollouts that were drawn and not trained. Their prompts are drawn again:"
    mode = config.trainer.mode
    if not trains_stale(config) or (kept.batch is None) == (mode is Mode.one_step_off):
        what = "groups of any age" if kept.batch is None else "a batch for the next step"
        note(f"{again} they are {what}, and trainer.mode={mode.value} as it is written draws none")
        return None
    keys = sorted(before.keys() | settings.keys())
    if other := [key for key in keys if before.get(key) != settings.get(key)]:
        note(f"{again} they were drawn or graded with other settings: {', '.join(other)}")
        return None
    newest = max((span.version for span in _spans(kept)), default=0)
    if newest > step:
        problem = f"{FILE} has tokens of version {newest}, and the checkpoint is of step {step}"
        raise CheckpointError(str(checkpoint), [f"{problem}. Resume from another step"])
    return replace(kept, num_trained=step * config.data.train_batch_size)


def with_progress(kept: KeptDraws, later: KeptDraws, step: int) -> KeptDraws:
    """``kept`` of the checkpoint of ``step``, with what was drawn of its groups until the trainer died.

    later: of the attempt that ended.  Tokens of weights that the trainer made after ``step`` do not count: it will not
    make the same ones again.
    """
    drawn = {(each.facts["ordinal"], each.row.id, each.row.epoch): each for each in later.groups}

    def best(group: DrawnGroup) -> DrawnGroup:
        other = drawn.get((group.facts["ordinal"], group.row.id, group.row.epoch))
        if other is None or group.episodes or other.facts["oldest"] > step:
            return group
        newest = max((span.version for span in _spans(replace(later, groups=(other,), batch=None))), default=0)
        further = bool(other.episodes) or _num_tokens(other) > _num_tokens(group)
        return other if further and newest <= step else group

    return replace(kept, groups=tuple(map(best, kept.groups)))


def _num_tokens(group: DrawnGroup) -> int:
    """Of the samples of an unfinished group."""
    return sum(len(sample.tokens) for _, sample in group.samples)


def _spans(kept: KeptDraws) -> Iterator[VersionSpan]:
    episodes = [*(kept.batch.episodes if kept.batch is not None else ())]
    for group in kept.groups:
        episodes += group.episodes
        for _, sample in group.samples:
            yield from sample.versions
    for episode in episodes:
        for segment in episode.segments:
            yield from segment.versions
