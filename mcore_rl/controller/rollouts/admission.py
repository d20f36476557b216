"""How many groups may be begun, and which of them a step trains: what keeps ``async.max_staleness``.

Numbers in, numbers out: nothing here waits or draws.  A group is the responses to one prompt.  Its staleness is counted
from the version of the weights that drew its oldest token to the version that the step which trains it begins with.

While version v is the newest, at most ``v + 1 + bound`` batches of groups have been begun (AReaL, arXiv:2505.24298,
section 5.1); fewer where ``extra`` says so.  That alone bounds nothing: a step that trains younger groups in place of
one that is unfinished leaves more to later steps than they can train in time.  So a step takes the groups that are due
first, and begins only if for every j at most j batches of the others are due within the j steps after it.  Else it
waits for one that is due sooner.  None of that asks whether weights change while a group is drawn: its age is counted
from its oldest token.

The invariants, which ``tests/controller/rollouts/test_admission.py`` holds for any order in which groups finish: no
group is trained beyond the bound; when all groups are finished a step can begin; and no group is passed over for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar


class Standing(Protocol):
    """A group that was begun and is not trained."""

    @property
    def ordinal(self) -> int:
        """Its number in the order in which groups are begun."""
        ...

    @property
    def oldest(self) -> int:
        """The version of its oldest token; of an unfinished group the oldest that it can be."""
        ...

    @property
    def finished(self) -> bool:
        """Whether all of its responses are finished and graded."""
        ...


G = TypeVar("G", bound=Standing)


@dataclass(frozen=True, kw_only=True)
class Admission:
    """The rule of one run.

    batch: groups that a step trains.
    bound: the most versions between a group's oldest token and the step that trains it (``async.max_staleness``).
    num_steps: the last step, beyond which nothing is begun.
    extra: groups that may be begun beyond those of the step at hand; None: as many as the bound allows.
    """

    batch: int
    bound: int
    num_steps: int
    extra: int | None = None

    def room(self, version: int, num_begun: int) -> int:
        """How many groups may be begun now.

        version: the newest, which is also the number of the last complete step.
        num_begun: groups of the whole run that were trained or will be; one that was dropped does not count.
        """
        most = min(version + 1 + self.bound, self.num_steps) * self.batch
        if self.extra is not None:
            most = min(most, (version + 1) * self.batch + self.extra)
        return max(0, most - num_begun)

    def overdue(self, version: int, groups: Iterable[G]) -> list[G]:
        """Those of ``groups`` that cannot be trained within the bound by the steps from ``version`` on.

        While the bound and the batch stay as they are there are none.  The others can, each step taking those that are
        due first.
        """
        late = list[G]()
        num_in_time = 0
        for group in sorted(groups, key=lambda group: (group.oldest, group.ordinal)):
            if num_in_time < (group.oldest + self.bound - version + 1) * self.batch:
                num_in_time += 1
            else:
                late.append(group)
        return late

    def choose(self, version: int, groups: Iterable[G]) -> list[G]:
        """The batch of the step that begins with ``version``, due first; [] if it must wait.

        groups: all that were begun and are neither trained nor dropped.
        """
        waiting = list(groups)
        finished = (group for group in waiting if group.finished)
        chosen = sorted(finished, key=lambda group: (group.oldest, group.ordinal))[: self.batch]
        if len(chosen) < self.batch:
            return []
        left = Counter(group.oldest for group in waiting)
        left.subtract(group.oldest for group in chosen)
        due = 0
        for oldest in sorted(left):
            due += left[oldest]  # within this many steps after this one
            if due > max(0, oldest + self.bound - version) * self.batch:
                return []
        for group in chosen:
            assert 0 <= version - group.oldest <= self.bound, f"group {group.ordinal} is of version {group.oldest}"
        return chosen
