"""What a run goes on with when its trainer died: the checkpoint's groups, with what was drawn of them since."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mcore_rl.controller.lifecycle.kept_rollouts import with_progress
from mcore_rl.controller.rollouts.drawn_file import DrawnGroup
from mcore_rl.controller.rollouts.kept_draws import KeptDraws
from mcore_rl.rewards.score import Score
from mcore_rl.rollout.episodes import VersionSpan
from tests.support.scripted_rollout import answered, row, sample


def drawn(
    ordinal: int, num_samples: int, *, oldest: int = 3, version: int = 3, number: int | None = None
) -> DrawnGroup:
    """An unfinished group."""
    spans = (VersionSpan(version=version, start=0, end=2),)
    samples = [((5, 6), replace(sample(f"p{ordinal}", index), versions=spans)) for index in range(num_samples)]
    facts: dict[str, Any] = {"ordinal": ordinal, "oldest": oldest}
    return DrawnGroup(row=row(ordinal if number is None else number), samples=tuple(samples), facts=facts)


def finished(ordinal: int, *, oldest: int = 3) -> DrawnGroup:
    """Its tokens are of version 3, as ``answered`` has it."""
    return DrawnGroup(
        row=row(ordinal), episodes=(answered(ordinal, Score(1.0)),), facts={"ordinal": ordinal, "oldest": oldest}
    )


def kept(*groups: DrawnGroup) -> KeptDraws:
    return KeptDraws(place={"position": 8}, groups=groups, next_ordinal=9, num_trained=24)


def test_groups_go_on_from_what_was_drawn_of_them_since() -> None:
    ours = kept(drawn(1, 1), drawn(2, 0), drawn(4, 2))
    got = with_progress(ours, kept(drawn(1, 2), finished(2), drawn(4, 3)), 3)
    assert [len(each.samples) for each in got.groups] == [2, 0, 3] and got.groups[1].episodes
    assert replace(got, groups=()) == replace(ours, groups=()), "all else is the checkpoint's"


def test_tokens_of_weights_that_are_lost_do_not_count() -> None:
    ours = kept(drawn(1, 1), drawn(2, 0), drawn(4, 0))
    later = kept(drawn(1, 2, version=4), finished(2, oldest=3), drawn(4, 1, oldest=4))
    assert with_progress(ours, later, 3).groups == (ours.groups[0], later.groups[1], ours.groups[2])
    assert with_progress(ours, later, 2).groups == ours.groups
    assert with_progress(ours, later, 4).groups == later.groups


def test_what_the_checkpoint_has_is_never_lost() -> None:
    ours = kept(finished(1), drawn(2, 3), drawn(4, 1), drawn(5, 1))
    later = kept(drawn(1, 2), drawn(2, 1), drawn(4, 2, number=7), drawn(6, 2))
    assert with_progress(ours, later, 3) == ours
    assert with_progress(ours, kept(), 3) == ours
