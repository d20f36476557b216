"""Files of pictures: shared by calls, read as they were written, and removed when no worker can want them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from mcore_rl.config.model import TowerKind, VisionConfig
from mcore_rl.rollout.vllm.engine.patch_files import PatchFiles, named, patches_of_names
from tests.support import seen_prompts

VISION = VisionConfig(
    kind=TowerKind.qwen3_vl, depth=2, hidden_size=32, num_heads=2, ffn_hidden_size=48, patch_size=16, merge_size=2,
    temporal_patch_size=2,
)  # fmt: skip
(PROMPT,) = seen_prompts.prompts(VISION, ["two"])


def count(folder: Path) -> int:
    return len(list(folder.iterdir()))


def test_a_model_reads_by_name_what_was_written(tmp_path: Path) -> None:
    files = PatchFiles(tmp_path / "pictures")
    files.open(PROMPT.pictures)
    names = torch.cat([named(each) for each in PROMPT.pictures])
    grids = torch.tensor([[1, each.placed.grid.h, each.placed.grid.w] for each in PROMPT.pictures])
    read = patches_of_names(tmp_path / "pictures", names, grids)
    np.testing.assert_array_equal(read.numpy(), np.concatenate([each.read() for each in PROMPT.pictures]))


def test_files_go_with_the_last_call_that_has_them(tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    files = PatchFiles(folder)
    one = files.open(PROMPT.pictures)
    other = files.open(PROMPT.pictures[:1])
    assert count(folder) == 2
    files.close(one, is_finished=True)
    assert count(folder) == 1, "the other call has its picture"
    files.close(other, is_finished=False)
    assert count(folder) == 1, "a worker may be at it"
    again = files.open(PROMPT.pictures[:1])
    files.clear()
    assert count(folder) == 1, "it is wanted again"
    files.close(again, is_finished=False)
    files.clear()
    assert count(folder) == 0


def test_a_file_of_a_call_that_was_given_up_outlives_another_that_ends(tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    files = PatchFiles(folder)
    given_up = files.open(PROMPT.pictures[:1])
    other = files.open(PROMPT.pictures[:1])
    files.close(given_up, is_finished=False)
    files.close(other, is_finished=True)
    assert count(folder) == 1, "a worker may be at the first call's still"
    files.clear()
    assert count(folder) == 0
