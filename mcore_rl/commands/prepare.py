"""Make the parquet files that runs train on and validate with, in the field's schema; or a tiny model to try them with.

    mcore-rl prepare arithmetic --difficulty 1 --train 4000 --val 500 --seed 1 --out data/arithmetic
    mcore-rl prepare products --train 4000 --val 500 --out data/products
    mcore-rl prepare gsm8k --source gsm8k/ --out data/gsm8k
    mcore-rl prepare gsm8k --source openai/gsm8k --out data/gsm8k
    mcore-rl prepare gsm8k-xml --source openai/gsm8k --out data/gsm8k-xml
    mcore-rl prepare math --source MATH/ --out data/math
    mcore-rl prepare dapo-math --source dapo-math-17k.parquet --out data/dapo
    mcore-rl prepare aime24 --source BytedTsinghua-SIA/AIME-2024 --out data/aime24
    mcore-rl prepare gsm8k-tools --source openai/gsm8k --out data/gsm8k-tools
    mcore-rl prepare gsm8k-interaction --source openai/gsm8k --out data/gsm8k-interaction
    mcore-rl prepare dapo-interpreter --source BytedTsinghua-SIA/DAPO-Math-17k --out data/dapo-interpreter
    mcore-rl prepare aime24-interpreter --source BytedTsinghua-SIA/AIME-2024 --out data/aime24-interpreter
    mcore-rl prepare eurus2-rl --source PRIME-RL/Eurus-2-RL-Data --out data/eurus2-rl
    mcore-rl prepare geo3k --source hiyouga/geometry3k --out data/geo3k
    mcore-rl prepare squares --train 4000 --val 500 --out data/squares

SOURCE is a folder or a file (jsonl, json, parquet) as its authors publish it, or a Hugging Face id, which is the only
thing that uses the network.  --out gets one file a split, train.parquet and test.parquet (eurus2-rl, and what is
generated, have others); each replaces its predecessor only when it is complete.  Then:

    mcore-rl train data.train_files=[data/gsm8k/train.parquet] data.val_files=[data/gsm8k/test.parquet] ...

docs/data.md says more, also of the columns and of data sets of your own.  A model to start from, with random weights
and a tokenizer that is made from such files, of any family that mcore-rl models lists as tiny:

    mcore-rl prepare tiny-model --data data/arithmetic --out models/tiny
    mcore-rl prepare tiny-model --data data/gsm8k --family qwen2 --vocab-size 2048 --out models/tiny-qwen2
    mcore-rl prepare tiny-model --data data/squares --family qwen2_5_vl --out models/tiny-vl
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mcore_rl.config.bounds import InputDirectory, Interval, OutputDirectory, PositiveInt, Seed
from mcore_rl.config.options import typed
from mcore_rl.data.arithmetic import LEVELS
from mcore_rl.data.datasets import (
    DATASETS,
    DatasetRow,
    arithmetic_rows,
    product_rows,
    published_rows,
    square_rows,
    write_rows,
)
from mcore_rl.data.media.images import image_size
from mcore_rl.data.tiny_model import PICTURES, SIZES, write_tiny_model
from mcore_rl.data.tiny_tokenizer import MIN_VOCAB_SIZE

TINY_MODEL = "tiny-model"
PRODUCTS = "products"
SQUARES = "squares"
VocabSize = Annotated[int, Interval(f"[{MIN_VOCAB_SIZE}, 1048576]")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See ``mcore_rl.cli.Command``."""
    parser.description = __doc__
    names = [*DATASETS, "arithmetic", PRODUCTS, SQUARES, TINY_MODEL]
    commands = parser.add_subparsers(dest="what", required=True, metavar=" | ".join(names))
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--out", type=typed(OutputDirectory), required=True, help="the folder; made if needed")
    shared.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
    )
    for name, dataset in DATASETS.items():
        made = commands.add_parser(name, parents=[shared], help=f"splits: {', '.join(dataset.splits)}")
        source = f"a folder, a file (jsonl, json, parquet) or a Hugging Face id, as {dataset.hub_id}"
        made.add_argument("--source", required=True, metavar="DIR|FILE|ID", help=source)
    generated = commands.add_parser("arithmetic", parents=[shared], help="generated word problems; splits: train, val")
    levels = "1: one sum, 2: two sums, 3: a product and a sum, 4: a product and three sums (default 1)"
    generated.add_argument("--difficulty", type=typed(PositiveInt), default=1, choices=list(LEVELS), help=levels)
    multiplied = commands.add_parser(
        PRODUCTS, parents=[shared], help="generated products, for a model with a calculator; splits: train, val, sft"
    )
    counted = commands.add_parser(
        SQUARES, parents=[shared], help="generated pictures, for a model that sees; splits: train, val"
    )
    for each in (generated, multiplied, counted):
        what = "problems (default %(default)s)"
        each.add_argument("--train", type=typed(PositiveInt), default=4000, help=f"training {what}")
        each.add_argument("--val", type=typed(PositiveInt), default=500, help=f"validation {what}")
        each.add_argument("--seed", type=typed(Seed), default=1, help="of the draw (default %(default)s)")
    tiny = commands.add_parser(TINY_MODEL, parents=[shared], help="a Hugging Face checkpoint with random weights")
    tiny.add_argument("--data", type=typed(InputDirectory), required=True, help="of parquet files, for the tokenizer")
    tiny.add_argument(
        "--family", default="mixtral", help=f"see mcore-rl models, or {', '.join(PICTURES)} (default %(default)s)"
    )
    tiny.add_argument("--vocab-size", type=typed(VocabSize), default=512, help="at most (default %(default)s)")
    tiny.add_argument("--max-length", type=typed(PositiveInt), default=1024, help="in tokens (default %(default)s)")
    tiny.add_argument("--seed", type=typed(Seed), default=1, help="of the weights (default %(default)s)")


def rows_of(arguments: argparse.Namespace) -> dict[str, list[DatasetRow]]:
    """By split, what the command line asks for."""
    if arguments.what == "arithmetic":
        return arithmetic_rows(arguments.difficulty, arguments.train, arguments.val, arguments.seed)
    if arguments.what == PRODUCTS:
        return product_rows(arguments.train, arguments.val, arguments.seed)
    if arguments.what == SQUARES:
        return square_rows(arguments.train, arguments.val, arguments.seed)
    return published_rows(arguments.what, arguments.source)


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
            sample.add_row(name, Text(_described(value) if name == "images" else str(value)))
    console.print(sample)


def _described(images: list[dict[str, Any]]) -> str:
    sizes = [image_size(image["bytes"]) for image in images]
    return ", ".join(f"{width} x {height} pixels" for width, height in sizes)


def prepare_tiny_model(options: argparse.Namespace) -> None:
    """Writes the model, and says what it is."""
    made = write_tiny_model(
        options.out,
        options.data,
        family=options.family,
        vocab_size=options.vocab_size,
        max_length=options.max_length,
        seed=options.seed,
    )
    about = f"{made.config['model_type']}, {made.num_parameters / 1e6:.2f} M parameters, {made.num_tokens} tokens"
    sizes = {name: made.config[name] for name in SIZES if name in made.config}
    Console().print(f"{options.out}: {about}\n{json.dumps(sizes)}")


def run(options: argparse.Namespace) -> int:
    """See ``mcore_rl.cli.Command``; 0 when every file has its name."""
    if options.what == TINY_MODEL:
        prepare_tiny_model(options)
        return 0
    errors = Console(stderr=True, emoji=False, soft_wrap=True)
    try:
        with errors.status(f"{options.what}: reading") as status:
            rows = rows_of(options)
            for split, of_split in rows.items():
                status.update(f"{options.what}: writing {len(of_split):,} rows of {split}")
                write_rows(of_split, options.out / f"{split}.parquet")
    except KeyboardInterrupt as interrupt:
        interrupt.add_note("Interrupted: files without .incomplete in their name are whole.")
        raise
    show(rows, options.out, Console())
    return 0
