#!/usr/bin/env python3
"""Weighs the package: tokens, files, keys, folders that import each other both ways, files that name vLLM.

    python tools/weight.py [--tree .] [--by-folder]

Tokens are Python's own, without comments and docstrings: lines say little of what there is to read.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "mcore_rl"
LAYOUT = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_tokens(path: Path) -> list[tokenize.TokenInfo]:
    """The tokens of a file, without comments, docstrings and layout."""
    tree = ast.parse(path.read_bytes())
    documented = [
        node for node in ast.walk(tree) if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False)
    ]
    docstrings = {node.body[0].lineno for node in documented}
    with path.open("rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type not in LAYOUT]
    return [each for each in tokens if not (each.type == tokenize.STRING and each.start[0] in docstrings)]


def names_vllm(tokens: list[tokenize.TokenInfo]) -> bool:
    """Whether they name vLLM, otherwise than in a path to its room."""
    words = " ".join(token.string.lower() for token in tokens).replace(". ", ".").replace(" .", ".")
    return "vllm" in words.replace("rollout.vllm", "")


def imports(path: Path) -> Iterator[str]:
    """The modules of the package that a file imports, wherever in it, but not for types alone."""
    tree = ast.parse(path.read_bytes())
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node not in for_types and (node.module or "").startswith(PACKAGE):
            yield node.module or ""


def folder(path: Path) -> str:
    """The folder of a file or module within the package, to any depth; "" is the package itself."""
    return ".".join(path.parts[1:-1])


def both_ways(tree: Path) -> list[tuple[str, str]]:
    """The pairs of folders of which each imports the other; a folder and what lies in it count, too."""
    arrows = set[tuple[str, str]]()
    for path in (tree / PACKAGE).rglob("*.py"):
        here = folder(path.relative_to(tree))
        for module in imports(path):
            place = Path(*module.split("."))
            there = folder(place / "x") if (tree / place).is_dir() else folder(place)
            if here != there:
                arrows.add((here, there))
    return sorted((here, there) for here, there in arrows if here < there and (there, here) in arrows)


def weights(tree: Path) -> dict[str, str]:
    """What is counted, and how much there is."""
    sys.path.insert(0, str(tree))
    from mcore_rl.config.bounds import settings_of
    from mcore_rl.config.compose import compose
    from mcore_rl.config.run import RunConfig

    files = sorted((tree / PACKAGE).rglob("*.py"))
    tokens = {path: code_tokens(path) for path in files}
    room = tree / PACKAGE / "rollout" / "vllm"
    named = [path for path, of_file in tokens.items() if room not in path.parents and names_vllm(of_file)]
    tests = sum(len(path.read_bytes().splitlines()) for path in (tree / "tests").rglob("*.py"))
    pairs = both_ways(tree)
    return {
        "tokens of the package": f"{sum(map(len, tokens.values())):,}",
        "files of the package": f"{len(files):,}",
        "keys of train": f"{len(settings_of(compose(RunConfig, 'train', ['algorithm=grpo']))):,}",
        "pairs of folders both ways": f"{len(pairs)}: " + ", ".join(f"{a or PACKAGE} and {b}" for a, b in pairs),
        "files outside of rollout/vllm/ that name vLLM": f"{len(named)}",
        "lines of tests": f"{tests:,}",
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[1], help="a checkout (default: this one)")
    parser.add_argument("--by-folder", action="store_true", help="tokens of each folder, most first")
    options = parser.parse_args()
    tree = options.tree.resolve()
    if options.by_folder:
        counts = Counter[str]()
        for path in (tree / PACKAGE).rglob("*.py"):
            counts[folder(path.relative_to(tree)) or PACKAGE] += len(code_tokens(path))
        for name, count in counts.most_common():
            print(f"{count:>9,}  {name}")
        return
    for what, count in weights(tree).items():
        print(f"{what:<48} {count}")


if __name__ == "__main__":
    main()
