"""Fine-tuning of models that see pictures, from the command line, against transformers on the same rows.

transformers reads the pictures with its own processor and gets normalised pixels, one conversation at a time.
"""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mcore_rl.cli import main
from mcore_rl.data.media.prompts import PAD, WRITTEN
from mcore_rl.data.media.sizes import Sizing
from mcore_rl.families.config_json import read_config
from mcore_rl.families.flops import matmul_parameters, tower_flops
from mcore_rl.families.registry import model_of
from tests.support import prompt_files
from tests.support.pictures import picture
from tests.support.run_task import nothing_left

STEPS, SAVED, BATCH = 4, 2, 4
OWN_FILE = "own.png"
PATCH = {"qwen2_5_vl": 14, "qwen3_vl": 16}
# Two implementations in float32, each a mean over tens of tokens of log-probs that are right to 1e-6.
TOLERANCE = 3e-6
# (family, layout, whether the tower learns, processes)
CASES = [
    ("qwen2_5_vl", "actor.parallel.pp=2", True, 2),
    ("qwen3_vl", "actor.microbatch_patches=90", True, 2),
    pytest.param("qwen3_vl", "actor.parallel.tp=2", False, 2, marks=pytest.mark.tier("full")),
    pytest.param("qwen2_5_vl", "actor.parallel.cp=2", True, 2, marks=pytest.mark.tier("full")),
]


def rows(count: int) -> list[dict[str, Any]]:
    """Rows of two pictures, of text alone, of one picture twice, and of one that others have, in a file of its own."""
    made = []
    for number in range(count):
        one, other = picture(84, 56, seed=number), picture(112, 112, seed=number)
        kinds: list[tuple[str, list[bytes]]] = [
            ("<image>or <image>?", [one, other]),
            ("What is 2 + 3?", []),
            ("<image>How many, and in <image>?", [one, one]),
            ("<image>How many?", []),
        ]
        asked, pictures = kinds[number % 4]
        images: list[dict[str, Any]] = [{"bytes": each, "path": None} for each in pictures]
        if number % 4 == 3:
            images = [{"bytes": None, "path": OWN_FILE}]
        made.append({"prompt": prompt_files.user(asked), "response": f"#### {number}", "images": images})
    return made


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of rows, and tiny models that see, from the command line."""
    directory = tmp_path_factory.mktemp("pictures")
    assert main(["prepare", "squares", "--train", "8", "--val", "2", "--out", str(directory / "squares")]) == 0
    for family in PATCH:
        made = ["--data", str(directory / "squares"), "--family", family, "--out", str(directory / family)]
        assert main(["prepare", "tiny-model", *made]) == 0
    (directory / OWN_FILE).write_bytes(picture(56, 56))
    for name, count in (("train", STEPS * BATCH), ("val", 5)):
        prompt_files.write(directory / f"{name}.parquet", rows(count))
    return directory


def words(task: Path, family: str, directory: Path, *more: str) -> list[str]:
    return [
        "sft",
        f"model.path={task}/{family}",
        f"data.train_files=[{task}/train.parquet]",
        f"data.val_files=[{task}/val.parquet]",
        "data.image_key=images",
        f"data.train_batch_size={BATCH}",
        "data.shuffle=false",
        "data.max_length=96",
        "actor.precision=float32",
        "actor.microbatch_tokens=128",
        "actor.optim.lr=3e-3",
        "trainer.device=cpu",
        "trainer.logger=[]",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.test_freq={STEPS}",
        f"trainer.save_freq={SAVED}",
        f"trainer.default_local_dir={directory}",
        *more,
    ]


def metrics_of(directory: Path) -> dict[int, dict[str, float]]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {line.pop("step"): line for line in lines}


@torch.no_grad()
def loss_of(model_path: Path, asked: list[dict[str, Any]], patch: int, own: bytes) -> float:
    """By transformers: of what the assistant says and the token that ends it.  own: the file of its own."""
    auto: Any = AutoModelForImageTextToText
    model = auto.from_pretrained(model_path, dtype=torch.float32, attn_implementation="sdpa")
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    numbers = json.loads((model_path / "preprocessor_config.json").read_text())
    processor = Qwen2VLImageProcessorPil(
        patch_size=patch,
        size={"shortest_edge": 56 * 56, "longest_edge": 1_003_520},
        image_mean=numbers["image_mean"],
        image_std=numbers["image_std"],
    )
    end, pad = tokenizer.convert_tokens_to_ids(["<|end|>", PAD])
    total, count = 0.0, 0
    for row in asked:
        given: dict[str, Any] = {}
        content = row["prompt"][0]["content"]
        if row["images"]:
            files = [each["bytes"] or own for each in row["images"]]
            images = [Image.open(BytesIO(each)).convert("RGB") for each in files]
            given = dict(processor(images=images, return_tensors="pt"))
            for grid in given["image_grid_thw"]:
                content = content.replace("<image>", WRITTEN.replace(PAD, PAD * (int(grid.prod()) // 4)), 1)
        asked_text = f"<|begin|><|user|>{content}<|end|><|assistant|>"
        answer = [*tokenizer.encode(row["response"], add_special_tokens=False), end]
        tokens = torch.tensor([[*tokenizer.encode(asked_text, add_special_tokens=False), *answer]])
        if given:
            given["mm_token_type_ids"] = (tokens == pad).int()
        logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), **given).logits[0].float()
        chosen = torch.log_softmax(logits, dim=-1)[:-1].gather(1, tokens[0, 1:, None])[-len(answer) :]
        total -= float(chosen.double().sum())
        count += len(answer)
    return total / count


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    with safe_open(directory / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no mapping


def refuses_another_picture(given: list[str], path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run does not go on while the file of a picture has another of the same size."""
    before = path.read_bytes()
    path.write_bytes(picture(56, 56, seed=9))
    capsys.readouterr()
    assert main(given) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"data.image_key=images: {path.name} (1) differs from what the checkpoint was made with" in said
    assert "begin another run with trainer.resume_mode=off" in said
    path.write_bytes(before)


@pytest.mark.parametrize(("family", "layout", "trained", "processes_"), CASES)
def test_a_run_learns_what_transformers_says_and_goes_on_with_the_same_bits(
    family: str,
    layout: str,
    trained: bool,
    processes_: int,
    task: Path,
    tmp_path: Path,
    fast_ray: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    more = [layout, f"trainer.n_gpus_per_node={processes_}", *([] if trained else ["actor.vision=frozen"])]
    with nothing_left():
        assert main(words(task, family, tmp_path / "whole", *more)) == 0
        parts = words(task, family, tmp_path / "parts", *more)
        assert main([*parts, f"trainer.total_training_steps={SAVED}"]) == 0
        refuses_another_picture(parts, task / OWN_FILE, capsys)
        assert main(parts) == 0
    whole, again = (metrics_of(tmp_path / name) for name in ("whole", "parts"))
    final, resumed = (tmp_path / name / "hf" / "final" for name in ("whole", "parts"))
    assert (final / "model.safetensors").read_bytes() == (resumed / "model.safetensors").read_bytes()
    losses = [whole[step]["sft/loss"] for step in range(1, STEPS + 1)]
    assert [again[step]["sft/loss"] for step in range(1, STEPS + 1)] == losses

    train, held = (pq.read_table(task / f"{name}.parquet").to_pylist() for name in ("train", "val"))
    patch = PATCH[family]
    own = (task / OWN_FILE).read_bytes()
    assert losses[0] == pytest.approx(loss_of(task / family, train[:BATCH], patch, own), abs=TOLERANCE)
    assert whole[0]["sft/val_loss"] == pytest.approx(loss_of(task / family, held, patch, own), abs=TOLERANCE)
    assert whole[STEPS]["sft/val_loss"] == pytest.approx(loss_of(final, held, patch, own), abs=TOLERANCE)
    assert whole[STEPS]["sft/val_loss"] < whole[0]["sft/val_loss"] - 0.2

    before, after = weights_of(task / family), weights_of(final)
    assert before.keys() == after.keys(), "spelt as the source"
    moved = [name for name in before if "visual." in name and not torch.equal(before[name], after[name])]
    assert bool(moved) is trained
    assert (final / "preprocessor_config.json").read_bytes() == (
        task / family / "preprocessor_config.json"
    ).read_bytes()
    assert whole[1]["pictures/count"] == 5 and whole[1]["pictures/different"] == 4
    assert whole[1]["pictures/patches"] > 4 * whole[1]["pictures/count"]
    shown = [each["bytes"] or own for row in train[:BATCH] for each in row["images"]]
    counts_its_tower(whole[1], task / family, shown, patch, trained=trained)


def counts_its_tower(
    metrics: dict[str, float], model_path: Path, shown: list[bytes], patch: int, *, trained: bool
) -> None:
    """Operations are those of matrices, of different pictures, and of some attention among 96 tokens at most."""
    _, model = model_of(read_config(model_path), pictures=True)
    grids = {each: Sizing(patch=patch).grid(*Image.open(BytesIO(each)).size) for each in shown}
    tokens = sum(grids[each].tokens for each in shown) / metrics["pictures/token_share"]
    pairs = 49 * tokens * model.num_layers  # at most: a token sees itself and the tokens before it
    attention = 3 * 4 * model.num_attention_heads * model.head_dim * pairs
    seen = tower_flops(model, [(each.h, each.w) for each in grids.values()], train=trained)
    left = metrics["perf/tflop_updates"] * 1e12 - seen - 6 * matmul_parameters(model) * tokens
    assert 0 < left < attention < seen


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("data.image_key=photo", "images: images are not supported, and 12 would be read as text alone"),
        ("data.image_key=null", "data.image_key=images gives pictures to a model that sees some"),
        ("data.max_images=1", "images: has 2 pictures, more than 1"),
        ("actor.microbatch_patches=8", "actor.microbatch_patches=8: "),
        ("data.max_length=12", "have more than data.max_length=12 tokens"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(
    task: Path, tmp_path: Path, written: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words(task, "qwen2_5_vl", tmp_path / "run", written), "--check"]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


def test_a_model_without_a_tower_is_refused(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = ["--data", str(task / "squares"), "--family", "qwen2", "--out", str(tmp_path / "qwen2")]
    assert main(["prepare", "tiny-model", *made]) == 0
    capsys.readouterr()
    given = words(task, "qwen2_5_vl", tmp_path / "run", f"model.path={tmp_path}/qwen2")
    assert main([*given, "--check"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "data.image_key=images: gives models pictures, and model.path=" in said and "no vision tower" in said
