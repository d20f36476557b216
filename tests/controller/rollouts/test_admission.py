"""The rule of admission, over thousands of random orders in which groups finish."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from mcore_rl.controller.rollouts.admission import Admission


@dataclass
class Standing:
    """A group of the play.  ordinal, oldest, finished: see ``admission.Standing``."""

    ordinal: int
    oldest: int
    finished: bool = False


class Play:
    """A run of which only the numbers are there: groups are begun, finish in any order, are dropped, and are trained.

    Weights may be published while groups are under way, so that their tokens may be of several versions.
    """

    def __init__(self, rule: Admission, seed: int, slow: float, dropped: float) -> None:
        self.rule, self.random, self.slow, self.dropped = rule, random.Random(seed), slow, dropped
        self.in_turns = rule.extra is not None  # nothing is drawn while a step trains
        self.most = rule.bound * rule.batch if rule.extra is None else rule.extra
        self.version = self.num_begun = self.num_ordinals = 0
        self.live: dict[int, Standing] = {}
        self.late = set[int]()  # groups that an engine holds as long as anything else can go on
        self.trained: list[tuple[int, int]] = []  # (ordinal, staleness)
        self.lost: list[int] = []

    def begin(self) -> None:
        for _ in range(self.rule.room(self.version, self.num_begun)):
            group = Standing(self.num_ordinals, self.version)
            self.live[group.ordinal] = group
            if self.random.random() < self.slow:
                self.late.add(group.ordinal)
            self.num_begun, self.num_ordinals = self.num_begun + 1, self.num_ordinals + 1

    def finish_one(self) -> bool:
        under_way = [each for each in self.live.values() if not each.finished]
        quick = [each for each in under_way if each.ordinal not in self.late]
        if not under_way:
            return False
        group = self.random.choice(quick or under_way)
        if self.random.random() < self.dropped:
            del self.live[group.ordinal]
            self.lost.append(group.ordinal)
            self.num_begun -= 1
            self.begin()
        else:
            group.finished = True
            group.oldest = self.random.randint(group.oldest, self.version)  # it may have waited for an engine
        return True

    def run(self) -> None:
        while self.version < self.rule.num_steps:
            self.begin()
            while not (chosen := self.rule.choose(self.version, self.live.values())):
                assert self.finish_one(), "all are finished, and no step can begin"
            for group in chosen:
                assert self.live.pop(group.ordinal).finished
                self.trained.append((group.ordinal, self.version - group.oldest))
            for _ in range(0 if self.in_turns else self.random.randrange(3 * self.rule.batch)):  # while the step trains
                self.finish_one()
            assert len(self.live) <= self.most
            self.version += 1


@pytest.mark.parametrize("in_turns", [False, True])
@pytest.mark.parametrize("dropped", [0.0, 0.3])
@pytest.mark.parametrize("slow", [0.0, 0.1, 0.5])
def test_no_bound_is_exceeded_nothing_is_lost_and_every_step_begins(
    slow: float, dropped: float, in_turns: bool
) -> None:
    reached = set[tuple[int, int]]()
    for seed in range(300):
        draw = random.Random(seed)
        rule = Admission(batch=draw.randint(1, 5), bound=draw.randint(0, 6), num_steps=draw.randint(1, 30))
        if in_turns:
            rule = replace(rule, extra=draw.randint(0, rule.bound * rule.batch))
        play = Play(rule, seed, slow, dropped)
        play.run()
        ordinals = [ordinal for ordinal, _ in play.trained]
        assert len(play.trained) == rule.num_steps * rule.batch and len(set(ordinals)) == len(ordinals)
        assert sorted([*ordinals, *play.lost]) == list(range(play.num_ordinals)), "trained or dropped, each once"
        assert not play.live, "nothing is begun that no step trains"
        assert max(stale for _, stale in play.trained) <= rule.bound
        reached.add((rule.bound, max(stale for _, stale in play.trained)))
    assert {(bound, bound) for bound in range(7)} <= reached or (in_turns and not slow), "the bound is used"


def test_no_group_is_passed_over_for_more_than_the_bound() -> None:
    """A group that an engine holds back is trained as soon as it must be: the others wait for it."""
    rule = Admission(batch=2, bound=2, num_steps=50)
    play = Play(rule, 0, 0.2, 0.0)
    play.run()
    places = {ordinal: place // rule.batch for place, (ordinal, _) in enumerate(play.trained)}
    assert all(step - ordinal // rule.batch <= rule.bound for ordinal, step in places.items())
    assert any(places[a] > places[b] for a in places for b in places if a < b), "until then they overtake it"


def test_the_step_that_younger_groups_would_starve_waits() -> None:
    """Admission alone does not keep the bound: eta=2, batches of 2, one group of each version unfinished."""
    rule = Admission(batch=2, bound=2, num_steps=9)
    first = [Standing(number, 0, number not in (0, 1)) for number in range(6)]
    assert rule.choose(0, first) == first[2:4]
    second = [*first[:2], *first[4:], Standing(6, 1, True), Standing(7, 1, True)]
    assert rule.choose(1, second) == first[4:], "two of the oldest are left, and step 3 can train both"
    third = [*first[:2], *second[4:], Standing(8, 2, True), Standing(9, 2, True)]
    assert rule.choose(2, third) == [], "two of younger versions are finished, but those of version 0 are due now"
    first[0].finished = True
    assert rule.choose(2, third) == [], "one more is due"
    first[1].finished = True
    assert rule.choose(2, third) == first[:2]


@pytest.mark.parametrize(("version", "begun", "room"), [(0, 0, 6), (0, 6, 0), (1, 6, 2), (3, 8, 2), (4, 10, 0)])
def test_room_is_what_the_bound_and_the_last_step_leave(version: int, begun: int, room: int) -> None:
    assert Admission(batch=2, bound=2, num_steps=5).room(version, begun) == room


@pytest.mark.parametrize(("version", "begun", "room"), [(0, 0, 3), (1, 3, 2), (3, 8, 1), (4, 9, 1)])
def test_in_turns_a_step_begins_its_batch_and_the_share_beyond(version: int, begun: int, room: int) -> None:
    assert Admission(batch=2, bound=2, num_steps=5, extra=1).room(version, begun) == room


def test_those_that_are_due_first_are_trained_first() -> None:
    rule = Admission(batch=2, bound=3, num_steps=9)
    groups = [Standing(4, 1, True), Standing(3, 1, True), Standing(9, 0, True), Standing(2, 1, False)]
    assert [group.ordinal for group in rule.choose(1, groups)] == [9, 3]
