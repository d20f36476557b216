"""`make train`'s task after its first half: generated word problems, and a tiny mixture that is fine-tuned on them."""

from __future__ import annotations

from pathlib import Path

from mcore_rl.cli import main


def write(folder: Path) -> Path:
    """The data and the model that `make train` begins its second half with, in ``folder``."""
    data, model, sft = folder / "data", folder / "model", folder / "sft"
    for words in (
        ["prepare", "arithmetic", "--difficulty", "1", "--train", "4000", "--val", "400", "--out", str(data)],
        ["prepare", "tiny-model", "--data", str(data), "--out", str(model)],
        ["sft", "recipe=arithmetic_sft", *files(folder), f"model.path={model}", f"trainer.default_local_dir={sft}",
         "trainer.n_gpus_per_node=1", "actor.parallel.ep=1", "trainer.logger=[]"],
    ):  # fmt: skip
        assert main(words) == 0
    return folder


def files(folder: Path) -> list[str]:
    """The settings that name the data of ``folder``."""
    return [f"data.{key}_files=[{folder / 'data' / f'{key}.parquet'}]" for key in ("train", "val")]


def model(folder: Path) -> str:
    """The setting that names the model of ``folder``."""
    return f"model.path={folder / 'sft' / 'hf' / 'final'}"
