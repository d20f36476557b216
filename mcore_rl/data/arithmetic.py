"""Generated questions: word problems of a chosen difficulty, with solutions in GSM8K's form, and products.

Word problems (a sum a line, then ``#### answer``) are for runs that must learn something in minutes: few words, small
numbers, one right answer.  Products a small model cannot work out: it must learn to use a calculator.  A digest of its
text alone assigns a question to training or validation, so no run, whatever its seed, trains on a validation question
of another; a product is of one split in whichever order its numbers are asked for.  Both splits have the same words and
sums, but never the same question.

Invariant: equal arguments give equal questions, none twice, on every machine and version of Python.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from mcore_rl.ground.errors import ConfigError, Violation

Choice = TypeVar("Choice")
Made = TypeVar("Made")


class Split(Enum):
    """The split of a question; one question in ten is for validation."""

    train = "train"
    validation = "validation"


@dataclass(frozen=True)
class Problem:
    """A word problem.  solution: every step as ``a + b = c``, then ``#### answer``.  answer: digits alone."""

    question: str
    solution: str
    answer: str


@dataclass(frozen=True)
class Level:
    """A difficulty.

    changes: how often the amount changes.  largest: the largest number in a question.  packs: whether the first amount
    is a product.  largest_pack: the largest factor of that product.
    """

    changes: int
    largest: int
    packs: bool = False
    largest_pack: int = 10


LEVELS = {
    1: Level(changes=1, largest=12),
    2: Level(changes=2, largest=20),
    3: Level(changes=1, largest=50, packs=True),
    4: Level(changes=3, largest=100, packs=True, largest_pack=20),
}

NAMES = (
    "Tom",
    "Anna",
    "Ben",
    "Mia",
    "Sam",
    "Lily",
    "Max",
    "Emma",
    "Leo",
    "Zoe",
    "Jack",
    "Ruth",
    "Omar",
    "Ines",
    "Kofi",
)
THINGS = ("apples", "pens", "books", "cards", "coins", "eggs", "cups", "balls", "stamps", "shells", "keys", "cakes")
PACKS = ("boxes", "bags", "packs")
GAINS = ("buys {} more", "finds {} more", "gets {} more", "wins {} more")
LOSSES = ("gives away {}", "loses {}", "sells {}")
SMALLEST = 2  # "1 apples" is no English
LEAST_FACTOR = 100
LARGEST_FACTOR = 999
VALIDATION_SHARE = 10
TRIES = 100  # draws per wanted problem, before we conclude that there are too few


def generate(difficulty: int, count: int, seed: int, split: Split) -> list[Problem]:
    """``count`` different problems of ``split``.

    difficulty: 1 one sum of numbers up to 12; 2 two sums, up to 20; 3 a product and a sum, up to 50; 4 a product and
    three sums, up to 100.

    ConfigError: there is no such difficulty, ``count`` is not positive or more than there are problems.
    """
    if difficulty not in LEVELS:
        remedy = f"Write one of {', '.join(map(str, LEVELS))}"
        raise ConfigError([Violation("difficulty", difficulty, "there is no such difficulty", remedy)])
    rng = random.Random(f"{seed}/{difficulty}/{split.value}")
    drawn = (_draw(LEVELS[difficulty], rng) for _ in range(TRIES * count + 10_000))
    candidates = ((each.question, each.question, each) for each in drawn)
    return distinct(candidates, count, split, f"difficulty {difficulty} has about {{}} problems")


def distinct(candidates: Iterable[tuple[str, str, Made]], count: int, split: Split, there: str) -> list[Made]:
    """The first ``count`` of ``candidates`` that are of ``split``, each once.

    candidates: (the text that says of which split it is, its name, itself).  there: says how many {} there are.

    ConfigError: ``count`` is not positive, or more than there are.
    """
    if count < 1:
        raise ConfigError([Violation(split.value, count, "must be positive", "Write 1 or more")])
    made: dict[str, Made] = {}
    for text, name, each in candidates:
        if split_of(text) is split:
            made.setdefault(name, each)
        if len(made) == count:
            return list(made.values())
    problem = f"{there.format(len(made))} of this split"
    raise ConfigError([Violation(split.value, count, problem, f"Write {len(made) * 9 // 10} or less")])


def split_of(question: str) -> Split:
    """The split to which ``question`` belongs."""
    digest = hashlib.sha256(question.encode()).digest()
    return Split.validation if int.from_bytes(digest[:8], "big") % VALIDATION_SHARE == 0 else Split.train


def _draw(level: Level, rng: random.Random) -> Problem:
    name = _choose(rng, NAMES)
    thing = _choose(rng, THINGS)
    lines = []
    if level.packs:
        packs, each = (_between(rng, SMALLEST, level.largest_pack) for _ in range(2))
        amount = packs * each
        sentences = [f"{name} has {packs} {_choose(rng, PACKS)} of {each} {thing}"]
        lines.append(f"{packs} * {each} = {amount}")
    else:
        amount = _between(rng, SMALLEST, level.largest)
        sentences = [f"{name} has {amount} {thing}"]
    for _ in range(level.changes):
        gain = amount < SMALLEST or rng.random() < 0.5
        change = _between(rng, SMALLEST, level.largest if gain else min(amount, level.largest))
        after = amount + change if gain else amount - change
        sentences.append(_choose(rng, GAINS if gain else LOSSES).format(change))
        lines.append(f"{amount} {'+' if gain else '-'} {change} = {after}")
        amount = after
    story = ", ".join(sentences[:-1]) + f" and {sentences[-1]}"
    question = f"{story}. How many {thing} does {name} have?"
    return Problem(question, "\n".join([*lines, f"#### {amount}"]), str(amount))


def _choose(rng: random.Random, options: Sequence[Choice]) -> Choice:
    return options[int(rng.random() * len(options))]  # only random() is the same in every version of Python


def _between(rng: random.Random, smallest: int, largest: int) -> int:
    return smallest + int(rng.random() * (largest - smallest + 1))


@dataclass(frozen=True)
class Product:
    """A question for a product of two numbers of three digits.  answer: digits alone."""

    left: int
    right: int

    @property
    def question(self) -> str:
        """What the model is asked."""
        return f"What is {self.left} * {self.right}?"

    @property
    def pair(self) -> str:
        """The same for both orders of the numbers."""
        return f"{min(self.left, self.right)} * {max(self.left, self.right)}"

    @property
    def answer(self) -> str:
        """What is right."""
        return str(self.left * self.right)

    @property
    def conversation(self) -> list[dict[str, str]]:
        """The question, a call of the tool ``calculator`` in Hermes' form, its result, and the answer."""
        call = json.dumps({"name": "calculator", "arguments": {"expression": f"{self.left} * {self.right}"}})
        said = {
            "user": self.question,
            "assistant": f"<tool_call>{call}</tool_call>",
            "tool": self.answer,
        }
        turns = [{"role": role, "content": content} for role, content in said.items()]
        return [*turns, {"role": "assistant", "content": f"#### {self.answer}"}]


def products(count: int, seed: int, split: Split) -> list[Product]:
    """``count`` different products of ``split``.  ConfigError: ``count`` is not positive, or more than there are."""
    rng = random.Random(f"{seed}/products/{split.value}")
    drawn = (Product(*(_between(rng, LEAST_FACTOR, LARGEST_FACTOR) for _ in range(2))) for _ in range(TRIES * count))
    candidates = ((each.pair, each.question, each) for each in drawn)
    return distinct(candidates, count, split, "there are about {} products")
