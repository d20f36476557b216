"""``mcore-rl generate`` on rows with pictures: the responses are those of transformers, picture by picture."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from mcore_rl.cli import main
from mcore_rl.config.data import DataConfig
from mcore_rl.data.media.prompts import PictureReader
from mcore_rl.data.media.sizes import Sizing
from mcore_rl.data.prompts import PromptSet
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.families.config_json import read_config
from mcore_rl.families.registry import model_of
from tests.support import picture_models
from tests.support.vllm_device import ON_VLLM_DEVICE

LENGTH = 6
UNFINISHED = "\ufffd"  # a character whose last bytes are missing; vLLM leaves it out at the end of a text


def expected(model: Path, file: Path) -> list[str]:
    """Greedy responses of transformers' model to the rows of ``file``."""
    vision = model_of(read_config(model), pictures=True)[1].vision
    assert vision is not None
    reader, tokenizer = PictureReader(Sizing(vision.patch_size)), load_tokenizer(model)
    prompts = PromptSet.load([file], DataConfig(), tokenizer, max_samples=None, title="data.files", pictures=reader)
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
            if tokens[0, -1] == tokenizer.eos_token_id:
                break
        text = str(tokenizer.decode(tokens[0, len(prompt.tokens) :], skip_special_tokens=True))
        texts.append(text.rstrip(UNFINISHED))
    return texts


def test_responses_to_pictures_are_those_of_transformers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], fast_ray: None
) -> None:
    """From the command line alone: pictures and a model are prepared, and responses drawn."""
    assert main(["prepare", "squares", "--train", "2", "--val", "6", "--out", str(tmp_path / "squares")]) == 0
    squares, model = tmp_path / "squares", tmp_path / "model"
    assert main(["prepare", "tiny-model", "--data", str(squares), "--family", "qwen3_vl", "--out", str(model)]) == 0
    weights = load_file(model / "model.safetensors")  # of which random ones hardly tell pictures apart
    strong = {name: tensor * 6 if tensor.dim() > 1 else tensor for name, tensor in weights.items()}
    save_file(strong, model / "model.safetensors", metadata={"format": "pt"})
    file = squares / "val.parquet"
    out = tmp_path / "answers.parquet"
    words = [
        f"model.path={model}", f"data.files=[{file}]", "data.image_key=images", f"data.max_response_length={LENGTH}",
        "data.max_prompt_length=100", "rollout.temperature=0", "rollout.n=1", f"out={out}", "rollout.dtype=float32",
        ON_VLLM_DEVICE["rollout"], f"rollout.kv_cache_memory_bytes={16 << 20}", "rollout.max_num_seqs=8",
    ]  # fmt: skip
    assert main(["generate", *words]) == 0
    theirs = expected(model, file)
    assert len(set(theirs)) > 1, "else pictures may be taken for one another"
    assert [each["responses"] for each in pq.read_table(out).to_pylist()] == [[text] for text in theirs]
    assert "6 pictures, 6 different" in capfd.readouterr().err
    words[2] = "data.image_key=null"
    assert main(["generate", *words, "overwrite=true"]) != 0
    assert "data.image_key=images gives pictures" in capfd.readouterr().err
