"""What stands beside the weights comes along, and config.json says what is true of the new ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mcore_rl.checkpoints.hf_sidecar_files import copy_sidecar_files
from mcore_rl.config.role import Head
from mcore_rl.ground.errors import CheckpointError

KEPT = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "merges.txt",
    "chat_template.jinja",
    "modeling.py",
    "qwen.tiktoken",
    "vocab.bpe",
    "additional_chat_templates/tool_use.jinja",
)
LEFT = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    "README.md",
    "x.bin",
    "adapter_config.json",  # transformers would load the base that it names
)


def _copied(tmp_path: Path, config: dict[str, object], **options: bool) -> dict[str, object]:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    (source / "additional_chat_templates").mkdir()
    for name in (*KEPT, *LEFT):
        (source / name).write_text(name)
    (source / "folder.json").mkdir()
    (source / "config.json").write_text(json.dumps(config))
    copy_sidecar_files(source, target, torch.bfloat16, **options)
    written = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    assert written == {*KEPT, "config.json"}
    assert all((target / name).read_text() == name for name in KEPT)
    assert json.loads((source / "config.json").read_text()) == config
    values: dict[str, object] = json.loads((target / "config.json").read_text())
    return values


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"dtype": "float32"}, {"dtype": "bfloat16"}),
        ({"torch_dtype": "float16"}, {"torch_dtype": "bfloat16"}),
        ({"dtype": "float32", "torch_dtype": "float32"}, {"dtype": "bfloat16", "torch_dtype": "bfloat16"}),
        ({}, {"torch_dtype": "bfloat16"}),
        ({"num_nextn_predict_layers": 1, "dtype": "bfloat16"}, {"num_nextn_predict_layers": 0, "dtype": "bfloat16"}),
        ({"quantization_config": {"quant_method": "fp8"}, "dtype": "bfloat16"}, {"dtype": "bfloat16"}),
    ],
)
def test_the_config_tells_the_truth_of_the_weights(
    tmp_path: Path, said: dict[str, object], expected: dict[str, object]
) -> None:
    rest = {"hidden_size": 8, "rope_scaling": {"factor": 2.0}, "name": "Schräg"}
    assert _copied(tmp_path, rest | said) == rest | expected


def test_a_critic_is_a_classifier_of_one_label(tmp_path: Path) -> None:
    config = _copied(tmp_path, {"architectures": ["Qwen2ForCausalLM"], "dtype": "bfloat16"}, head=Head.value)
    assert config == {"architectures": ["Qwen2ForSequenceClassification"], "dtype": "bfloat16", "num_labels": 1}


@pytest.mark.parametrize(
    ("content", "words"), [(None, "cannot be read"), ("{", "is not JSON"), ("[]", "is no JSON object")]
)
def test_a_source_without_a_config_is_refused(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=f"config.json: {words}"):
        copy_sidecar_files(tmp_path, tmp_path / "nowhere", torch.bfloat16)


def test_a_target_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be copied: No such file"):
        copy_sidecar_files(tmp_path, tmp_path / "nowhere", torch.bfloat16)
