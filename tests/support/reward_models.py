"""Tiny sequence classifiers that vLLM's CPU build runs, and what transformers says of the same tokens."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2Model,
)

from mcore_rl.config.engine import Precision
from mcore_rl.config.reward_model import RewardModelConfig
from mcore_rl.config.trainer import ModelPathConfig
from mcore_rl.data.arithmetic import Split, generate
from mcore_rl.data.tiny_tokenizer import build_tokenizer
from tests.support import prompt_files, rollouts
from tests.support.vllm_device import VLLM_DEVICE


def config(directory: Path, **changes: object) -> RewardModelConfig:
    """float32, a small KV cache, texts of 200 tokens."""
    tiny = dict(dtype=Precision.float32, kv_cache_memory_bytes=16 * 2**20, max_num_seqs=16, device=VLLM_DEVICE)
    settings = tiny | dict(enable=True, model=ModelPathConfig(path=str(directory)), max_length=200)
    return RewardModelConfig(**(settings | changes))  # type: ignore[arg-type]


def write(
    directory: Path, kind: str | PreTrainedConfig = "llama", *, labels: int = 1, seed: int = 0
) -> PreTrainedModel:
    """A checkpoint of ``kind`` (of ``rollouts.CONFIGS``, or a configuration) with seeded weights; scores about +-10."""
    torch.manual_seed(seed)
    made = copy.deepcopy(rollouts.CONFIGS[kind] if isinstance(kind, str) else kind)
    made.num_labels = labels
    model = AutoModelForSequenceClassification.from_config(made, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        model.score.weight.normal_()
    model.eval().save_pretrained(directory)
    return model


def reference(model: PreTrainedModel, texts: Sequence[Sequence[int]]) -> list[float]:
    """transformers' scores, one text at a time."""
    with torch.no_grad():
        return [float(model(torch.tensor([list(text)])).logits[0, 0]) for text in texts]


class TwoLayerReward:
    """Qwen2.5-Math-RM's form, which transformers does not have: a decoder and linear, ReLU, linear."""

    def __init__(self, directory: Path, seed: int = 0) -> None:
        torch.manual_seed(seed)
        made: Qwen2Config = copy.deepcopy(rollouts.CONFIGS["qwen2"])
        self.model = Qwen2Model._from_config(made, dtype=torch.float32, attn_implementation="eager").eval()
        width = made.hidden_size
        self.score = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
        tensors: dict[str, Tensor] = {f"model.{name}": each for name, each in self.model.state_dict().items()}
        tensors |= {f"score.{name}": each for name, each in self.score.state_dict().items()}
        directory.mkdir(exist_ok=True)
        save_file({name: each.contiguous() for name, each in tensors.items()}, directory / "model.safetensors")
        values = made.to_dict() | {"architectures": ["Qwen2ForRewardModel"]}
        (directory / "config.json").write_text(json.dumps(values))

    def reference(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """The score at the last token of each text."""
        with torch.no_grad():
            hidden = [self.model(torch.tensor([list(text)])).last_hidden_state[0, -1] for text in texts]
            return [float(self.score(each)) for each in hidden]


def load(directory: Path) -> PreTrainedModel:
    """What ``write`` saved."""
    model = AutoModelForSequenceClassification.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def write_judge(directory: Path) -> None:
    """A Llama reward model with a tokenizer and a chat template that are not the task's model's."""
    problems = generate(2, 200, 0, Split.train)
    build_tokenizer([each.solution for each in problems], directory, 300)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    tokenizer.chat_template = prompt_files.BARE
    tokenizer.save_pretrained(directory)
    sizes = dict(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)
    write(directory, LlamaConfig(**rollouts.SIZES | sizes))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A parquet file of ``rows``, whose ``reward_model`` may have no ground truth in any."""
    kind = pa.struct([("style", pa.string()), ("ground_truth", pa.string())])
    schema = pa.Table.from_pylist([row | {"reward_model": None} for row in rows]).schema
    place = schema.get_field_index("reward_model")
    return prompt_files.write(path, rows, schema.set(place, pa.field("reward_model", kind)))
