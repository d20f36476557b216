"""A tiny model with random weights and a tokenizer of its own, as a Hugging Face checkpoint: something to start from.

The tokenizer is made from the texts of parquet files that tools/prepare_data.py wrote; the model is of any family of
model_configs/ that has a tiny configuration.

    python tools/make_tiny_model.py --data data/arithmetic --out models/tiny                    # a mixture of experts
    python tools/make_tiny_model.py --data data/gsm8k --family qwen2 --vocab-size 2048 --out models/tiny-qwen2
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from mcore_rl.config.bounds import InputDirectory, OutputDirectory, PositiveInt, Seed
from mcore_rl.config.options import read_options, typed
from mcore_rl.errors import ConfigError, McoreRLError, Violation
from mcore_rl.families.checkpoints import find_checkpoint, published_config

CONFIGS = Path(__file__).resolve().parents[1] / "model_configs"
SIZES = dict(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
# What the tiny configurations of model_configs/ have to be proven: positions stretched from few ones to few more.
STRETCHED = ("rope_scaling", "rope_theta", "rope_local_base_freq", "original_max_position_embeddings")


def texts(directory: Path) -> list[str]:
    """Everything that is asked and answered in the parquet files of ``directory``."""
    import pyarrow.parquet as pq

    pieces: list[str] = []
    for path in sorted(directory.glob("*.parquet")):
        for row in pq.read_table(path).to_pylist():
            pieces += [message["content"] for message in row["prompt"]]
            pieces.append(str((row.get("extra_info") or {}).get("answer") or ""))
    if not pieces:
        raise ConfigError([Violation("--data", directory, "has no parquet files", "Write them with prepare_data.py")])
    return pieces


def configuration(family: str) -> dict[str, Any]:
    """The ``config.json`` of a tiny model of ``family``, whose positions go as far as ``max_position_embeddings``.

    Raises ConfigError if model_configs/ has no tiny one of that family.
    """
    known = published_config(find_checkpoint(f"tiny-{family.replace('_', '-')}", CONFIGS), CONFIGS)
    values = {key: value for key, value in known.items() if key not in STRETCHED} | SIZES | {"dtype": "float32"}
    values["rope_parameters"] = rope = {"rope_type": "default", "rope_theta": known.get("rope_theta", 10000.0)}
    if "kv_lora_rank" in known:  # latent attention: a key for each head, of widths of its own
        values["num_key_value_heads"] = values["num_attention_heads"]
        del values["head_dim"]
    if "head_dim" not in known:
        values.pop("head_dim", None)
    if "rope_local_base_freq" in known:  # layers of two kinds, each with its own positions
        local = rope | {"rope_theta": known["rope_local_base_freq"]}
        values["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
    return values


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument(
        "--data", type=typed(InputDirectory), required=True, help="directory of parquet files, for the tokenizer"
    )
    options.add_argument("--out", type=typed(OutputDirectory), required=True, help="directory of the checkpoint")
    options.add_argument("--family", default="mixtral", help="a folder of model_configs/ (default: %(default)s)")
    options.add_argument(
        "--vocab-size", type=typed(PositiveInt), default=512, help="most entries (default: %(default)s)"
    )
    options.add_argument(
        "--max-length", type=typed(PositiveInt), default=1024, help="context in tokens (default: %(default)s)"
    )
    options.add_argument("--seed", type=typed(Seed), default=1)
    return options


def main(words: Sequence[str] | None = None) -> int:
    """Write the checkpoint; 0, or 2 on a user error."""
    try:
        arguments = read_options(parser(), words)
        values = configuration(arguments.family)
        pieces = texts(arguments.data)
        import torch  # when all is checked
        from transformers import AutoConfig, AutoModelForCausalLM

        from mcore_rl.data.tiny_tokenizer import build_tokenizer

        tokenizer = build_tokenizer(pieces, arguments.out, arguments.vocab_size)
        values |= {
            "vocab_size": len(tokenizer),
            "max_position_embeddings": arguments.max_length,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }
        torch.manual_seed(arguments.seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
        model.save_pretrained(arguments.out)
    except McoreRLError as error:
        Console(stderr=True, emoji=False).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        return 2
    count = sum(parameter.numel() for parameter in model.parameters())
    Console().print(
        f"{arguments.out}: {values['model_type']}, {count / 1e6:.2f} M parameters, {len(tokenizer)} tokens\n"
        + json.dumps({name: values[name] for name in SIZES if name in values})
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
