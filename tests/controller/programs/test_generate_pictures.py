"""``mcore-rl generate`` on rows with pictures: the responses are those of transformers, picture by picture."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from mcore_rl.cli import main
from mcore_rl.config.data import DataConfig
from mcore_rl.data.media.prompts import END, PAD, START, PictureReader
from mcore_rl.data.media.sizes import Sizing
from mcore_rl.data.prompts import PromptSet
from mcore_rl.families.config_json import read_config
from mcore_rl.families.registry import model_of
from tests.support import picture_models
from tests.support.chat_styles import style
from tests.support.vllm_device import ON_VLLM_DEVICE

TOKENIZER = style("qwen3-vl")
LENGTH = 6


def seeing_model(directory: Path) -> Path:
    """A random Qwen3-VL with a tokenizer and its chat template."""
    picture_models.write("qwen3_vl", directory, vocab_size=len(TOKENIZER))
    TOKENIZER.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    named = {"image_token_id": PAD, "vision_start_token_id": START, "vision_end_token_id": END}
    config |= {name: TOKENIZER.convert_tokens_to_ids(token) for name, token in named.items()}
    config["video_token_id"] = TOKENIZER.convert_tokens_to_ids("<|video_pad|>")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def expected(model: Path, file: Path) -> list[str]:
    """Greedy responses of transformers' model to the rows of ``file``."""
    vision = model_of(read_config(model), pictures=True)[1].vision
    assert vision is not None
    reader = PictureReader(Sizing(vision.patch_size))
    prompts = PromptSet.load([file], DataConfig(), TOKENIZER, max_samples=None, title="data.files", pictures=reader)
    whole = picture_models.whole_model(model).eval()
    texts = []
    for index in range(len(prompts)):
        prompt = prompts[index]
        patches = torch.from_numpy(prompts.patches(index, 0)).float() / 255
        tokens = torch.tensor([prompt.tokens])
        seen = torch.zeros_like(tokens)
        (placed,) = prompt.media
        seen[0, placed.first : placed.end] = 1
        grid = torch.tensor([[1, placed.grid.h, placed.grid.w]])
        for _ in range(LENGTH):
            with torch.no_grad():
                logits = whole(
                    input_ids=tokens, attention_mask=torch.ones_like(tokens), pixel_values=(patches - 0.5) / 0.5,
                    image_grid_thw=grid, mm_token_type_ids=seen,
                ).logits  # fmt: skip
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
            seen = torch.cat([seen, torch.zeros(1, 1, dtype=seen.dtype)], dim=1)
            if tokens[0, -1] == TOKENIZER.eos_token_id:
                break
        texts.append(TOKENIZER.decode(tokens[0, len(prompt.tokens) :], skip_special_tokens=True))
    return texts


def test_responses_to_pictures_are_those_of_transformers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], fast_ray: None
) -> None:
    """From the command line alone: ``prepare squares``, then ``generate``."""
    assert main(["prepare", "squares", "--train", "2", "--val", "6", "--out", str(tmp_path / "squares")]) == 0
    model = seeing_model(tmp_path / "model")
    file = tmp_path / "squares" / "val.parquet"
    out = tmp_path / "answers.parquet"
    words = [
        f"model.path={model}", f"data.files=[{file}]", "data.image_key=images", f"data.max_response_length={LENGTH}",
        "data.max_prompt_length=100", "rollout.temperature=0", "rollout.n=2", f"out={out}", "rollout.dtype=float32",
        ON_VLLM_DEVICE["rollout"], f"rollout.kv_cache_memory_bytes={16 << 20}", "rollout.max_num_seqs=8",
    ]  # fmt: skip
    assert main(["generate", *words]) == 0
    theirs = expected(model, file)
    assert len(set(theirs)) > 1, "else pictures may be taken for one another"
    assert [each["responses"] for each in pq.read_table(out).to_pylist()] == [[text, text] for text in theirs]
    assert "6 pictures, 6 different" in capfd.readouterr().err
    words[2] = "data.image_key=null"
    assert main(["generate", *words, "overwrite=true"]) != 0
    assert "data.image_key=images gives pictures" in capfd.readouterr().err
