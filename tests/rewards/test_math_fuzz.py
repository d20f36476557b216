"""Random expressions, spelled and changed at random: the grader says what sympy says of the trees they were made from.

sympy gets the trees and not the LaTeX, so that it judges reading as well as comparing.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest
import sympy

from mcore_rl.config.reward import RewardConfig
from mcore_rl.rewards.math import grade_math
from mcore_rl.rewards.score import RewardRequest

SEEDS = 60
CHANGES = 3  # of each expression
LEAVES = ("number", "number", "letter", "root", "pi")
OPERATORS = ("add", "add", "subtract", "multiply", "multiply", "divide", "power")


@dataclass(frozen=True)
class Tree:
    """An operator over trees, or a leaf: ``value`` is a number, a letter, or what is under a root."""

    operator: str
    parts: tuple[Tree, ...] = ()
    value: int | str = 0


def drawn(random: Random, depth: int) -> Tree:
    if depth == 0 or random.random() < 0.15:
        leaf = random.choice(LEAVES)
        value = random.choice("xyab") if leaf == "letter" else random.choice((2, 3, 5, 7, 11, 13))
        return Tree(leaf, value=value)
    operator = random.choice(OPERATORS)
    first = drawn(random, depth - 1)
    if operator == "power":
        return Tree(operator, (first, Tree("number", value=random.randint(2, 3))))
    return Tree(operator, (first, drawn(random, depth - 1)))


def expression_of(tree: Tree) -> sympy.Expr:
    parts = [expression_of(part) for part in tree.parts]
    match tree.operator:
        case "number":
            return sympy.Integer(tree.value)
        case "letter":
            return sympy.Symbol(str(tree.value), real=True)
        case "root":
            return sympy.sqrt(tree.value)
        case "pi":
            return sympy.pi
        case "add":
            return parts[0] + parts[1]
        case "subtract":
            return parts[0] - parts[1]
        case "multiply":
            return parts[0] * parts[1]
        case "divide":
            return parts[0] / parts[1]
        case _:
            return parts[0] ** parts[1]


def latex_of(tree: Tree, random: Random) -> str:
    """One of many ways to write ``tree``, with its terms and factors in any order."""
    match tree.operator:
        case "number":
            return str(tree.value)
        case "letter":
            return str(tree.value)
        case "root":
            return random.choice((f"\\sqrt{{{tree.value}}}", f"\\sqrt {{{tree.value}}}"))
        case "pi":
            return random.choice(("\\pi", "\\pi ", "{\\pi}"))
    parts = list(tree.parts)
    if tree.operator in ("add", "multiply") and random.random() < 0.5:
        parts.reverse()
    first, second = (latex_of(part, random) for part in parts)
    space = random.choice(("", " ", "\\,"))
    match tree.operator:
        case "add":
            return f"{first}{space}+{space}{second}"
        case "subtract":
            return f"{first}{space}-{space}{bracketed(second, parts[1], ('add', 'subtract'), random)}"
        case "divide":
            if random.random() < 0.2:
                sums = ("add", "subtract", "multiply", "divide")
                return f"{bracketed(first, parts[0], sums, random)} / {bracketed(second, parts[1], sums, random)}"
            return f"\\{random.choice(('', 'd', 't'))}frac{{{first}}}{{{second}}}"
        case "power":
            every = ("add", "subtract", "multiply", "divide", "power", "root")
            return f"{bracketed(first, parts[0], every, random)}^{random.choice((second, f'{{{second}}}'))}"
    sums = ("add", "subtract", "divide")
    sign = random.choice(("\\cdot ", "\\times ", " \\cdot "))
    return bracketed(first, parts[0], sums, random) + sign + bracketed(second, parts[1], sums, random)


def bracketed(text: str, tree: Tree, operators: tuple[str, ...], random: Random) -> str:
    if tree.operator not in operators:
        return text
    return random.choice((f"({text})", f"\\left({text}\\right)", f"\\left( {text} \\right)", f"\\bigl({text}\\bigr)"))


def changed(tree: Tree, random: Random) -> Tree:
    """``tree`` with one leaf or one operator replaced by another of its kind."""
    if tree.parts and random.random() < 0.75:
        place = random.randrange(len(tree.parts))
        parts = list(tree.parts)
        parts[place] = changed(parts[place], random)
        return Tree(tree.operator, tuple(parts), tree.value)
    match tree.operator:
        case "number" | "root":
            assert isinstance(tree.value, int)
            return Tree(tree.operator, value=tree.value + random.choice((1, 4)))
        case "letter":
            return Tree("letter", value="c" if tree.value != "c" else "d")
        case "pi":
            return Tree("number", value=3)
        case "power":
            return tree.parts[0]
        case operator:
            others = [each for each in ("add", "subtract", "multiply", "divide") if each != operator]
            return Tree(random.choice(others), tree.parts)


def same(first: sympy.Expr, second: sympy.Expr) -> bool:
    verdict = first.equals(second)
    return bool(sympy.simplify(first - second) == 0) if verdict is None else bool(verdict)


def is_right(answer: str, gold: str) -> bool:
    return grade_math(RewardRequest(("p", 0), "math", f"so \\boxed{{{answer}}}", gold), RewardConfig()).value == 1.0


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.tier("full")) for first in range(10, SEEDS, 10))]
)
def test_the_grader_agrees_with_sympy(first: int) -> None:
    num_same = num_changed = 0
    for seed in range(first, first + 10):
        random = Random(seed)
        tree = drawn(random, 3)
        truth, gold = expression_of(tree), latex_of(tree, random)
        assert is_right(gold, gold), gold
        for answer in (latex_of(tree, random), latex_of(tree, random), sympy.latex(truth), sympy.latex(truth.expand())):
            assert is_right(answer, gold), (answer, gold)
            num_same += 1
        for _ in range(CHANGES):
            other = changed(tree, random)
            if not same(expression_of(other), truth):
                answer = latex_of(other, random)
                assert not is_right(answer, gold), (answer, gold)
                num_changed += 1
    assert num_same == 40 and num_changed >= 15
