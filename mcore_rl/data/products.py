"""Generated products that a small model cannot work out, for runs in which it must learn to use a calculator.

A pair of numbers is assigned to training or validation as in ``arithmetic``, in whichever order it is asked for: no
run trains on the product of a validation question.  Equal arguments give equal questions, none twice.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from mcore_rl.data.arithmetic import TRIES, Split, split_of
from mcore_rl.errors import ConfigError, Violation

SMALLEST, LARGEST = 100, 999


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
    if count < 1:
        raise ConfigError([Violation(split.value, count, "must be positive", "Write 1 or more")])
    rng = random.Random(f"{seed}/products/{split.value}")
    chosen: dict[str, Product] = {}
    for _ in range(TRIES * count):
        product = Product(*(SMALLEST + int(rng.random() * (LARGEST - SMALLEST + 1)) for _ in range(2)))
        if split_of(product.pair) is split:
            chosen.setdefault(product.question, product)
        if len(chosen) == count:
            return list(chosen.values())
    problem = f"there are about {len(chosen)} products of this split"
    raise ConfigError([Violation(split.value, count, problem, f"Write {len(chosen) * 9 // 10} or less")])
