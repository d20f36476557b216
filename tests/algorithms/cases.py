"""Ragged steps as plain Python lists, random ones and the edges, for references that share nothing with the package."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import chain

import torch

from mcore_rl.algorithms.advantages.inputs import AdvantageInputs


@dataclass(frozen=True)
class Case:
    """One list entry a sequence; inner lists one entry a token."""

    masks: list[list[bool]]
    rewards: list[list[float]]
    values: list[list[float]]
    groups: list[int]
    greedy: list[float]
    parts: list[list[float]]  # two named rewards of each sequence

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(len(mask) for mask in self.masks)

    def trained(self, rows: list[list[float]]) -> list[list[float]]:
        """Of ``rows``, the entries of trained tokens."""
        return [
            [x for x, kept in zip(row, mask, strict=True) if kept] for row, mask in zip(rows, self.masks, strict=True)
        ]

    def at_tokens(self, trained: list[list[float]]) -> list[float]:
        """One entry a trained token, back at its place among zeros; flat."""
        flat = []
        for mask, row in zip(self.masks, trained, strict=True):
            entries = iter(row)
            flat += [next(entries) if kept else 0.0 for kept in mask]
        return flat

    @property
    def group_S(self) -> torch.Tensor:
        return torch.tensor(self.groups)

    def parts_SK(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.tensor(self.parts, dtype=dtype)

    def inputs(self, dtype: torch.dtype = torch.float64) -> AdvantageInputs:
        return AdvantageInputs(
            lengths_S=self.lengths,
            mask_T=torch.tensor(list(chain.from_iterable(self.masks))),
            outcome_S=torch.zeros(len(self.masks), dtype=dtype),
            process_T=torch.tensor(list(chain.from_iterable(self.rewards)), dtype=dtype),
            values_T=torch.tensor(list(chain.from_iterable(self.values)), dtype=dtype),
            greedy_S=torch.tensor(self.greedy, dtype=dtype),
        )


def make(
    masks: list[list[bool]], groups: list[int], seed: int = 0, scores: list[float] | None = None, dense: bool = False
) -> Case:
    """``scores`` on last trained tokens, random ones where None; ``dense`` adds a reward to every token."""
    draw = random.Random(seed)
    rewards, values = [], []
    for index, mask in enumerate(masks):
        row = [draw.gauss(0, 0.3) if dense else 0.0 for _ in mask]
        trained = [position for position, kept in enumerate(mask) if kept]
        if trained:
            row[trained[-1]] += draw.choice([0.0, 0.1, 1.0, -2.5]) if scores is None else scores[index]
        rewards.append([x if kept else 1e6 for x, kept in zip(row, mask, strict=True)])  # untrained: never to be read
        values.append([draw.gauss(0, 1) if kept else -1e6 for kept in mask])
    greedy = [draw.choice([0.0, 1.0]) for _ in groups]
    parts = [[draw.choice([0.0, 1.0]), draw.gauss(0, 3)] for _ in groups]
    if scores is not None:  # the edges are the parts' too
        parts = [[score, 3 * score] for score in scores]
    return Case(masks, rewards, values, groups, greedy, parts)


def drawn(seed: int) -> Case:
    """Prompts of several tokens, holes in the masks, some empty responses, groups of 1 to 5 in shuffled order."""
    draw = random.Random(seed)
    groups = [prompt * 7 - 3 for prompt in range(draw.randint(1, 5)) for _ in range(draw.randint(1, 5))]
    draw.shuffle(groups)
    masks = []
    for _ in groups:
        prompt, response = draw.randint(1, 3), draw.choice([0, 1, 2, 5, 9])
        masks.append([False] * prompt + [draw.random() < 0.8 for _ in range(response)])
    return make(masks, groups, seed, dense=draw.random() < 0.5)


P, R = [False], [True]  # a token of a prompt, of a response

EDGES = {
    "one_member_group": make([P + 2 * R, P + 3 * R, P + R], [0, 1, 1], scores=[1.0, 1.0, 0.0]),
    "only_one_member_groups": make([P + 2 * R, P + 3 * R], [4, 9], scores=[1.0, 0.5]),
    "equal_rewards": make([P + 2 * R, 2 * P + 3 * R, P + R], [0, 0, 0], scores=[0.1, 0.1, 0.1]),
    "equal_rewards_in_one_group": make([P + R, P + R, P + 2 * R, P + R], [0, 0, 1, 1], scores=[1.0, 1.0, 0.0, 1.0]),
    "empty_response": make([P + 2 * R, 3 * P, P + R], [0, 0, 0], scores=[1.0, 9.0, 0.0]),
    "empty_response_leaves_one_member": make([P + 2 * R, P], [0, 0], scores=[1.0, 0.0]),
    "length_1_responses": make([P + R, P + R, P + R], [0, 0, 0], scores=[1.0, 0.0, 0.0]),
    "length_1_sequence": make([P, P + R, P + R], [0, 0, 0], scores=[0.0, 1.0, 0.0]),
    "one_trained_token": make([P + R, 2 * P], [0, 0], scores=[1.0, 0.0]),
    "all_masked": make([2 * P, 3 * P, P], [0, 0, 1]),
    "holes": make([P + R + P + R, P + R + 2 * P + R + P], [0, 0], scores=[1.0, 0.0]),
}

ALL = EDGES | {f"drawn_{seed}": drawn(seed) for seed in range(40)}
