"""Make the parquet files that mcore-rl trains on and validates with, in the field's schema.

    python tools/prepare_data.py arithmetic --difficulty 1 --train 4000 --val 500 --seed 1 --out data/arithmetic
    python tools/prepare_data.py gsm8k --source gsm8k/ --out data/gsm8k
    python tools/prepare_data.py gsm8k --source openai/gsm8k --out data/gsm8k
    python tools/prepare_data.py gsm8k-xml --source openai/gsm8k --out data/gsm8k-xml
    python tools/prepare_data.py math --source MATH/ --out data/math
    python tools/prepare_data.py dapo-math --source dapo-math-17k.parquet --out data/dapo
    python tools/prepare_data.py aime24 --source BytedTsinghua-SIA/AIME-2024 --out data/aime24

SOURCE is a folder or a file (jsonl, json, parquet) as its authors publish it, or a Hugging Face id, which is the only
thing that uses the network.  OUT gets one file a split, train.parquet and test.parquet (arithmetic: val.parquet); each
replaces its predecessor only when it is complete.  Then:

    mcore-rl train data.train_files=[data/gsm8k/train.parquet] data.val_files=[data/gsm8k/test.parquet] ...

docs/data.md says more, also of the columns and of data sets of your own.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mcore_rl.config.bounds import OutputDirectory, PositiveInt, Seed
from mcore_rl.config.options import check_options, typed
from mcore_rl.data.arithmetic import LEVELS
from mcore_rl.data.datasets import DATASETS, DatasetRow, arithmetic_rows, published_rows, write_rows
from mcore_rl.errors import McoreRLError

INTERRUPTED = 130  # as a shell reports SIGINT


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(dest="dataset", required=True, metavar=" | ".join([*DATASETS, "arithmetic"]))
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--out", type=typed(OutputDirectory), required=True, help="the folder of the parquet files; made if needed"
    )
    shared.add_argument("--debug", action="store_true", help="show the traceback of an error")
    for name, dataset in DATASETS.items():
        made = commands.add_parser(name, parents=[shared], help=f"splits: {', '.join(dataset.splits)}")
        source = f"a folder, a file (jsonl, json, parquet) or a Hugging Face id, as {dataset.hub_id}"
        made.add_argument("--source", required=True, metavar="DIR|FILE|ID", help=source)
    generated = commands.add_parser("arithmetic", parents=[shared], help="generated word problems; splits: train, val")
    levels = "1: one sum, 2: two sums, 3: a product and a sum, 4: a product and three sums (default 1)"
    generated.add_argument("--difficulty", type=typed(PositiveInt), default=1, choices=list(LEVELS), help=levels)
    generated.add_argument(
        "--train", type=typed(PositiveInt), default=4000, help="training problems (default %(default)s)"
    )
    generated.add_argument(
        "--val", type=typed(PositiveInt), default=500, help="validation problems (default %(default)s)"
    )
    generated.add_argument("--seed", type=typed(Seed), default=1, help="of the draw (default %(default)s)")
    return top


def rows_of(arguments: argparse.Namespace) -> dict[str, list[DatasetRow]]:
    """By split, what the command line asks for."""
    if arguments.dataset == "arithmetic":
        return arithmetic_rows(arguments.difficulty, arguments.train, arguments.val, arguments.seed)
    return published_rows(arguments.dataset, arguments.source)


def show(rows: dict[str, list[DatasetRow]], out: Path, console: Console) -> None:
    """What was written: files with row counts, and the first row to look at."""
    files = Table(show_edge=False)
    files.add_column("file", overflow="fold")
    for heading in ("rows", "characters of a prompt: mean, longest"):
        files.add_column(heading)
    for split, of_split in rows.items():
        lengths = [sum(len(message["content"]) for message in row["prompt"]) for row in of_split]
        files.add_row(
            str(out / f"{split}.parquet"), f"{len(of_split):,}", f"{sum(lengths) / len(lengths):.0f}, {max(lengths)}"
        )
    console.print(files)
    first = next(iter(rows.values()))[0]
    sample = Table("a row", "", show_edge=False, show_lines=True)
    for name, value in first.items():
        if value is not None:
            sample.add_row(name, Text(str(value)))
    console.print(sample)


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 when every file has its name, 2 on an error, 130 when interrupted."""
    arguments = parser().parse_args(argv)
    console, errors = Console(), Console(stderr=True, emoji=False, soft_wrap=True)
    try:
        check_options(arguments, parser())
        with errors.status(f"{arguments.dataset}: reading") as status:
            rows = rows_of(arguments)
            for split, of_split in rows.items():
                status.update(f"{arguments.dataset}: writing {len(of_split):,} rows of {split}")
                write_rows(of_split, arguments.out / f"{split}.parquet")
    except McoreRLError as error:
        if arguments.debug:
            raise
        errors.print(f"error: {error}", markup=False, highlight=False)
        return 2
    except KeyboardInterrupt:
        errors.print("Interrupted: files without .incomplete in their name are whole.", markup=False, highlight=False)
        return INTERRUPTED
    show(rows, arguments.out, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
