"""Reads the arguments of verl's command out of a shell script, without running it.

Understood are assignments, ``${NAME:-default}`` and its relatives, arithmetic, arrays, quotes, ``if`` and ``[ ... ]``.
What only a run could tell, such as ``$(command)``, becomes ``UNKNOWN`` in the words that contain it.  Loops, functions
and ``case`` are passed over.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from mcore_rl.config.verl.shell_words import Token, past, tokenized

UNKNOWN = "\0"
SKIPPED = {"for": "done", "while": "done", "until": "done", "case": "esac"}  # how a block begins and ends
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=", re.DOTALL)
PARAMETER = re.compile(r"([A-Za-z_][A-Za-z0-9_]*|[@*#?0-9])(\[[@*]\])?(?:(:?[-+=?])(.*))?", re.DOTALL)
ARITHMETIC: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
}


@dataclass
class Shell:
    """The variables of a script.  launch: the arguments of verl's module, once it has been met."""

    variables: dict[str, str]
    arrays: dict[str, list[str]] = field(default_factory=dict)
    launch: list[str] | None = None
    module: str = ""


def arguments(script: str, environment: Mapping[str, str]) -> tuple[str, list[str]]:
    """(verl's module, the arguments that it is given); of a text without a command, ("", all its words).

    Raises UnclosedError.
    """
    shell = Shell(dict(environment))
    tokens = tokenized(script.replace("\\\n", " "))
    _run(shell, tokens, 0, len(tokens), active=True)
    if shell.launch is None:
        return "", [word for token in tokens if not token.is_operator for word in expanded(shell, token.text)]
    return shell.module, shell.launch


def _run(shell: Shell, tokens: list[Token], place: int, end: int, *, active: bool) -> int:
    """Runs the statements in ``tokens[place:end]``; returns where it stopped: at ``end``, or at a word that closes."""
    while place < end:
        token = tokens[place]
        if token.is_operator:
            place += 1
        elif token.text in ("then", "elif", "else", "fi", "done", "esac", "}"):
            return place
        elif token.text == "if":
            place = _if(shell, tokens, place, end, active=active)
        elif token.text in SKIPPED:
            begin, place = place, _skipped(tokens, place, end)
            _forget(shell, tokens[begin:place])
        elif token.text == "function" or [each.text for each in tokens[place + 1 : place + 3]] == ["(", ")"]:
            place = next((each for each in range(place, end) if tokens[each].text == "}"), end) + 1
        else:
            place = _list(shell, tokens, place, end, active=active)[0]
    return place


def _skipped(tokens: list[Token], place: int, end: int) -> int:
    closing, depth = SKIPPED[tokens[place].text], 0
    while place < end:
        depth += SKIPPED.get(tokens[place].text) == closing
        depth -= tokens[place].text == closing
        place += 1
        if not depth:
            break
    return place


def _if(shell: Shell, tokens: list[Token], place: int, end: int, *, active: bool) -> int:
    done, begin, told = False, place, True
    while place < end and tokens[place].text in ("if", "elif"):
        place, holds = _list(shell, tokens, place + 1, end, active=active and not done)
        while place < end and tokens[place].text != "then":
            place += 1
        taken = active and not done and holds is True
        place = _run(shell, tokens, place + 1, end, active=taken)
        told = told and (done or not active or holds is not None)
        done = done or taken or holds is None  # of a condition that is not known, neither branch is read
    if place < end and tokens[place].text == "else":
        place = _run(shell, tokens, place + 1, end, active=active and not done)
    if not told:
        _forget(shell, tokens[begin:place])
    return place + 1


def _forget(shell: Shell, tokens: list[Token]) -> None:
    """Nobody knows what the variables are that ``tokens`` assign, since it was not read whether and how they do."""
    for token in tokens:
        if match := ASSIGNMENT.match(token.text):
            shell.variables[match[1]] = UNKNOWN
            if token.items is not None:
                shell.arrays[match[1]] = [UNKNOWN]


def _list(shell: Shell, tokens: list[Token], place: int, end: int, *, active: bool) -> tuple[int, bool | None]:
    """(where it ends, whether it holds) of commands with && and || between them; None: that is not known."""
    holds: bool | None = True
    run, first = active, True
    while place < end:
        stop = place
        while stop < end and not tokens[stop].is_operator:
            stop += 1
        if stop > place:
            told = _command(shell, tokens[place:stop]) if run else None
            holds = told if run or first else holds
        first = False
        mark = tokens[stop].text if stop < end else "\n"
        place = min(stop + 1, end)
        if mark in ("&&", "||"):
            run = active and holds is (mark == "&&")
            while place < end and tokens[place].text == "\n":
                place += 1
        elif mark == "|":  # what a pipe gives is not read
            run = False
        elif mark not in ("<", ">", "&", "(", ")"):
            return place, holds
    return place, holds


def _command(shell: Shell, tokens: list[Token]) -> bool | None:
    """Whether a simple command succeeds; None: only a run would tell."""
    words = list(tokens)
    if words and words[0].text in ("export", "declare", "local", "readonly"):
        words = [each for each in words[1:] if not each.text.startswith("-")]
    if words and words[0].text == "!":
        told = _command(shell, words[1:])
        return None if told is None else not told
    while words and (match := ASSIGNMENT.match(words[0].text)):
        _assign(shell, match[1], bool(match[2]), words[0], words[0].text[match.end() :])
        words = words[1:]
    if not words:
        return True
    if words[0].text in ("[", "[[", "test"):
        inside = [
            text
            for each in words[1:]
            if each.text not in ("]", "]]")
            for text in expanded(shell, each.text, split=False)
        ]
        return condition(inside)
    fields = [text for each in words for text in expanded(shell, each.text)]
    for place, text in enumerate(fields):
        if text.startswith("verl.") or re.search(r"(?:^|/)(?:main_ppo|main_generation|main_eval|main_dapo)\.py$", text):
            shell.module, shell.launch = text, fields[place + 1 :]
            return True
    return True if fields and fields[0] in ("set", "echo", ":", "true", "cd", "unset") else None


def _assign(shell: Shell, name: str, append: bool, token: Token, value: str) -> None:
    if token.items is not None:
        items = [text for each in token.items for text in expanded(shell, each)]
        shell.arrays[name] = [*(shell.arrays.get(name, []) if append else []), *items]
        return
    text = " ".join(expanded(shell, value, split=False)) if value else ""
    shell.variables[name] = f"{shell.variables.get(name, '') if append else ''}{text}"


def condition(words: list[str]) -> bool | None:
    """What ``[ words ]`` says; None: only a run would tell."""
    if any(UNKNOWN in word for word in words):
        return None
    numbers = {
        "-eq": operator.eq,
        "-ne": operator.ne,
        "-gt": operator.gt,
        "-ge": operator.ge,
        "-lt": operator.lt,
        "-le": operator.le,
    }
    match words:
        case ["!", *others]:
            told = condition(others)
            return None if told is None else not told
        case ["-z", text]:
            return not text
        case ["-n", text] | [text]:
            return bool(text)
        case [left, "=" | "==", right]:
            return left == right
        case [left, "!=", right]:
            return left != right
        case [left, each, right] if each in numbers and left.lstrip("-").isdigit() and right.lstrip("-").isdigit():
            return bool(numbers[each](int(left), int(right)))
    return None


def expanded(shell: Shell, raw: str, *, split: bool = True) -> list[str]:
    """The words that a written one stands for.  split: whether what is not in quotes is cut at spaces."""
    words, open_word, no_items = [""], False, False
    for text, quoted, several in _pieces(shell, raw):
        if several is not None:
            no_items = no_items or not several
            if several:
                words[-1] += several[0]
                words += several[1:]
                open_word = True
        elif quoted or not split:
            words[-1] += text
            open_word = True
        else:
            cut = text.split()
            if cut:
                words[-1] += cut[0]
                words += cut[1:]
                open_word = True
    return words if open_word and not (no_items and words == [""]) else []


def _pieces(shell: Shell, raw: str) -> Iterator[tuple[str, bool, list[str] | None]]:
    """(text, whether it is in quotes, the items if it is a whole array) of each part of a written word."""
    place, quoted = 0, False
    while place < len(raw):
        end = place + 1
        if raw[place] == '"':
            quoted = not quoted
            yield "", True, None
        elif raw[place] == "'" and not quoted:
            end = past(raw, place)
            yield raw[place + 1 : end - 1], True, None
        elif raw[place] == "\\" and place + 1 < len(raw):
            end = place + 2
            keeps = quoted and raw[place + 1] not in '"\\$`'
            yield raw[place if keeps else place + 1 : end], True, None
        elif raw[place] == "`":
            end = past(raw, place)
            yield UNKNOWN, True, None
        elif raw[place] == "$":
            end = _expansion_end(raw, place)
            inside = raw[place + 2 : end - 1] if raw[place + 1 : place + 2] in ("{", "(") else raw[place + 1 : end]
            if raw.startswith("$((", place):
                yield _arithmetic(shell, inside[1:-1]), quoted, None
            elif raw.startswith("$(", place):
                yield UNKNOWN, True, None
            elif inside:
                text, several = _parameter(shell, inside)
                yield text, quoted, several
            else:
                yield "$", True, None
        else:
            while end < len(raw) and raw[end] not in "\"'\\$`":
                end += 1
            yield raw[place:end], True, None
        place = end


def _expansion_end(raw: str, place: int) -> int:
    if raw[place + 1 : place + 2] in ("{", "("):
        return past(raw, place)
    match = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[@*#?0-9]").match(raw, place + 1)
    return match.end() if match else place + 1


def _parameter(shell: Shell, inside: str) -> tuple[str, list[str] | None]:
    """(the text, or the items of a whole array) of ``${inside}``."""
    match = PARAMETER.fullmatch(inside)
    if match is None:
        return UNKNOWN, None  # of kinds that are not understood
    name, whole, kind, word = match.groups()
    if whole or name in ("@", "*"):
        return "", list(shell.arrays.get(name, []))
    value = shell.variables.get(name)
    if value is None and shell.arrays.get(name):
        value = shell.arrays[name][0]
    there = value is not None and (bool(value) or not (kind or "").startswith(":"))
    other = "".join(expanded(shell, word, split=False)) if word else ""
    if kind and kind.endswith("+"):
        return (other if there else ""), None
    if kind and kind.endswith("=") and not there:
        shell.variables[name] = other
    return (value or "") if there or not kind else other, None


def _arithmetic(shell: Shell, text: str) -> str:
    """The number that ``$((text))`` is, as text; UNKNOWN if it is none."""
    written = "".join(expanded(shell, text, split=False)) if "$" in text else text
    try:
        tree = ast.parse(written.replace("/", "//").strip(), mode="eval")
        return str(_number(shell, tree.body))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return UNKNOWN


def _number(shell: Shell, node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return int(shell.variables.get(node.id) or 0)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(shell, node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        return ARITHMETIC[type(node.op)](_number(shell, node.left), _number(shell, node.right))
    raise ValueError(ast.dump(node))
