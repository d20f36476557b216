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

import pyarrow.parquet as pq
import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

from mcore_rl.data.tiny_tokenizer import build_tokenizer
from mcore_rl.errors import ConfigError, McoreRLError, Violation
from mcore_rl.families.checkpoints import find_checkpoint, published_config

CONFIGS = Path(__file__).resolve().parents[1] / "model_configs"
SIZES = dict(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32)


def texts(directory: Path) -> list[str]:
    """Everything that is asked and answered in the parquet files of ``directory``."""
    pieces: list[str] = []
    for path in sorted(directory.glob("*.parquet")):
        for row in pq.read_table(path).to_pylist():
            pieces += [message["content"] for message in row["prompt"]]
            pieces.append(str((row.get("extra_info") or {}).get("answer") or ""))
    if not pieces:
        raise ConfigError([Violation("--data", directory, "has no parquet files", "Write them with prepare_data.py")])
    return pieces


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory of parquet files, for the tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--family", default="mixtral", help="a folder of model_configs/ (default: %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=512, help="most entries (default: %(default)s)")
    parser.add_argument("--max-length", type=int, default=1024, help="context in tokens (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> int:
    """Write the checkpoint; 0, or 2 on a user error."""
    arguments = parse_arguments()
    try:
        tokenizer = build_tokenizer(texts(arguments.data), arguments.out, arguments.vocab_size)
        known = find_checkpoint(f"tiny-{arguments.family.replace('_', '-')}", CONFIGS)
        values = published_config(known, CONFIGS) | SIZES
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
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        return 2
    count = sum(parameter.numel() for parameter in model.parameters())
    Console().print(
        f"{arguments.out}: {values['model_type']}, {count / 1e6:.2f} M parameters, {len(tokenizer)} tokens\n"
        + json.dumps({name: values[name] for name in SIZES})
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
