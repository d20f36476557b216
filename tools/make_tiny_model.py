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
from pathlib import Path

from rich.console import Console

from mcore_rl.config.bounds import InputDirectory, OutputDirectory, PositiveInt, Seed
from mcore_rl.config.options import read_options, typed
from mcore_rl.config.resources import MODEL_CONFIGS
from mcore_rl.errors import ConfigError, McoreRLError, Violation
from mcore_rl.families.checkpoints import find_checkpoint, published_config

SIZES = dict(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32)


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


def main() -> int:
    """Write the checkpoint; 0, or 2 on a user error."""
    try:
        arguments = read_options(parser())
        known = find_checkpoint(f"tiny-{arguments.family.replace('_', '-')}", MODEL_CONFIGS)
        values = published_config(known, MODEL_CONFIGS) | SIZES
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
            "dtype": "float32",
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
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
        + json.dumps({name: values[name] for name in SIZES})
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
