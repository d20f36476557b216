"""Where the features of pictures go, row by row, by hand: equal pictures once, padding, context and tensor ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mcore_rl.config.model import TowerKind, VisionConfig
from mcore_rl.ground.errors import ConfigError
from mcore_rl.ground.types import TrainBatch
from mcore_rl.training.microbatch import NOWHERE, build_microbatches
from tests.support import picture_models
from tests.training.test_microbatch import alone, cut, ranks_of

__all__ = ["alone"]  # the fixture

VISION = VisionConfig(
    kind=TowerKind.qwen2_5_vl, depth=1, hidden_size=8, num_heads=2, ffn_hidden_size=8, patch_size=2, window_size=8
)


def batch() -> TrainBatch:
    """Of 6 sequences: pictures of 8, 0, 4 and 30, 2, 4 and 2 tokens, of which two are the same as others."""
    return picture_models.batch_of(VISION)


@pytest.mark.parametrize("layout", ["", "cp=2", "tp=2", "tp=2,cp=2"])
def test_each_token_of_a_picture_gets_its_own_feature(layout: str) -> None:
    whole = batch()
    assert whole.images_S is not None and whole.feature_T is not None and whole.positions_T3 is not None
    seen = torch.zeros(len(whole.tokens_T), dtype=torch.int64)
    for groups in ranks_of(layout):
        for microbatch in cut(whole, groups, 80, None):
            assert microbatch.feature_N is not None and microbatch.packed is not None
            keys = [each.key for each in microbatch.pictures]
            assert len(keys) == len(set(keys))
            owners = [(each.key, number) for each in microbatch.pictures for number in range(each.tokens)]
            for row, source in enumerate(microbatch.sources_N.tolist()):
                feature = int(microbatch.feature_N[row])
                if source == NOWHERE or whole.feature_T[source] < 0:
                    assert feature == NOWHERE
                    continue
                sequence = max(place for place, start in enumerate(whole.offsets_S) if start <= source)
                number, images = int(whole.feature_T[source]), list(whole.images_S[sequence])
                while number >= images[0].tokens:
                    number -= images.pop(0).tokens
                assert owners[feature] == (images[0].key, number)
            held = microbatch.sources_N >= 0
            sources = microbatch.sources_N[held]
            seen[sources] += 1
            assert microbatch.packed.positions_3N is not None
            assert torch.equal(microbatch.packed.positions_3N[:, held], whole.positions_T3[sources].T)
    assert (seen == (2 if "tp=2" in layout else 1)).all()  # tensor ranks of one context rank have the same rows


def test_a_batch_without_pictures_is_what_it_was() -> None:
    plain = replace(batch(), positions_T3=None, feature_T=None, images_S=None, patches={})
    (groups,) = ranks_of("")
    for microbatch in cut(plain, groups, 80, None):
        assert microbatch.feature_N is None and microbatch.pictures == ()
        assert microbatch.packed is not None and microbatch.packed.positions_3N is None


def test_a_part_of_a_batch_has_its_own_pictures() -> None:
    part = batch().select([3, 1])
    assert part.images_S is not None
    assert [[image.key for image in images] for images in part.images_S] == [["least"], []]
    assert part.patches.keys() == {"least"}


@pytest.mark.parametrize("layout", ["", "cp=2"])
def test_a_microbatch_holds_neither_too_many_tokens_nor_too_many_patches(layout: str) -> None:
    """The six sequences would fit into one microbatch by their tokens, and need two by their patches."""
    whole = batch()
    assert whole.patches_S == [32, 0, 136, 8, 16, 8]
    groups = next(iter(ranks_of(layout)))
    options = {"tokens": 200, "sequences": None, "equal_over_experts": False}
    assert len(build_microbatches(whole, groups, **options)) == 1  # type: ignore[arg-type]
    parts = build_microbatches(whole, groups, patches=136, **options)  # type: ignore[arg-type]
    assert sorted(member for part in parts for member in part.members) == list(range(6))
    loads = [sum(whole.patches_S[member] for member in part.members) for part in parts]
    assert len(parts) == 2 and max(loads) == 136, loads
    with pytest.raises(ConfigError, match=r"microbatch_patches=135: 1 of 6 sequences do not fit.* takes 136 patches"):
        build_microbatches(whole, groups, patches=135, **options)  # type: ignore[arg-type]
