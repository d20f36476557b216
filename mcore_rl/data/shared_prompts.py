"""Sequences that begin with one prompt, which a packed microbatch then holds once: integers in, stems out.

The samples of a prompt form a tree of depth one (Prefix Grouper, arXiv:2506.05433):
a trunk, the prompt without its last token, and a branch for each sample, that token and all behind it.  The last token
is in every branch because it predicts what parts them; so each row of a microbatch predicts one token at most, and no
row of the trunk predicts a trained one.

Which prompts are equal is read from the tokens, so nothing has to say who sampled what.  Nothing here sees a process
group or a configuration.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mcore_rl.data.balance import balance, imbalance
from mcore_rl.data.packing import pack
from mcore_rl.ground.arrays import Int64Array


@dataclass(frozen=True)
class Stem:
    """Sequences, by index, whose first ``shared`` tokens are computed once; 0: each is computed by itself."""

    members: tuple[int, ...]
    shared: int = 0

    def tokens(self, lengths: Sequence[int]) -> int:
        """The tokens that are computed.  lengths: of all sequences, by index."""
        return sum(lengths[index] for index in self.members) - self.saved

    @property
    def saved(self) -> int:
        """The tokens that are not computed again."""
        return self.shared * (len(self.members) - 1)


def stems_of(
    tokens_T: Int64Array | NDArray[np.int32], mask_T: NDArray[np.bool_], lengths_S: Sequence[int]
) -> list[Stem]:
    """The sequences by equal prompts, by their first member; every sequence is in one stem.

    A prompt is what comes before the first trained token.  tokens_T, mask_T: of all sequences, end to end.
    """
    members: dict[bytes, list[int]] = {}
    prompts: dict[bytes, int] = {}
    start = 0
    for index, length in enumerate(lengths_S):
        trained = mask_T[start : start + length]
        prompt = int(trained.argmax()) if trained.any() else length
        key = tokens_T[start : start + prompt].tobytes()
        members.setdefault(key, []).append(index)
        prompts[key] = prompt
        start += length
    stems = [Stem(tuple(each), prompts[key] - 1) for key, each in members.items()]
    return sorted((part for stem in stems for part in parted(stem)), key=lambda stem: stem.members[0])


def parted(stem: Stem) -> list[Stem]:
    """``stem``, or its sequences by themselves if they share nothing."""
    if stem.shared and len(stem.members) > 1:
        return [stem]
    return [Stem((index,)) for index in stem.members]


def within(stems: Iterable[Stem], members: Iterable[int]) -> list[Stem]:
    """What ``members`` have of ``stems``; a sequence that is left alone shares nothing."""
    wanted = set(members)
    parts = list[Stem]()
    for stem in stems:
        left = tuple(index for index in stem.members if index in wanted)
        parts += parted(Stem(left, stem.shared))
    return parts


def loads(stems: Iterable[Stem], lengths: Sequence[int], shards: Iterable[Sequence[int]]) -> list[int]:
    """The tokens that each of ``shards``, lists of sequences, computes."""
    stem_of = {index: (number, stem.shared) for number, stem in enumerate(stems) for index in stem.members}
    computed = list[int]()
    for shard in shards:
        computed.append(sum(lengths[index] for index in shard))
        met = set[int]()
        for number, shared in (stem_of[index] for index in shard):
            computed[-1] -= shared * (number in met)
            met.add(number)
    return computed


def within_budget(stem: Stem, lengths: Sequence[int], budget: int) -> list[Stem]:
    """``stem`` in few parts of at most ``budget`` tokens, each with a trunk of its own.  lengths: none above it."""
    if stem.tokens(lengths) <= budget:
        return [stem]
    branches = pack([lengths[index] - stem.shared for index in stem.members], budget - stem.shared)
    parts = [tuple(stem.members[place] for place in places) for places in branches]
    return [shorter for part in parts for shorter in parted(Stem(part, stem.shared))]


def dealt(stems: Sequence[Stem], lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """The sequences of each of ``num_ranks`` ranks, ascending, so that the busiest computes few tokens.

    Whole stems balance worst and save most.  They are tried whole, in halves, in quarters and so on down to single
    sequences; the fewest parts win among equals.
    """
    size = max(len(stem.members) for stem in stems)
    parts_of_each = [1]
    while parts_of_each[-1] < size:
        parts_of_each.append(min(2 * parts_of_each[-1], size))
    best: tuple[float, list[list[int]]] | None = None
    for count in parts_of_each:
        parts = [part for stem in stems for part in _divided(stem, count)]
        if len(parts) < num_ranks:
            continue
        costs = [part.tokens(lengths) for part in parts]
        ranks = balance(costs, num_ranks)
        busiest = imbalance(costs, ranks) * sum(costs)
        if best is None or busiest < best[0]:
            best = busiest, [sorted(index for place in rank for index in parts[place].members) for rank in ranks]
    assert best is not None, f"fewer sequences than {num_ranks} ranks"
    return best[1]


def _divided(stem: Stem, count: int) -> Iterable[Stem]:
    parts = [stem.members[first::count] for first in range(min(count, len(stem.members)))]
    return [shorter for part in parts for shorter in parted(Stem(part, stem.shared))]
