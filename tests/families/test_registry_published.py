"""config.json as published, of over a hundred checkpoints: each is accepted, or refused for the reason that is stated.

``published_configs.json`` has fields and values alone.  ``source``: the public repository, commit and file that they
are from; a preset of mlc-llm is named as there, without the settings that mlc-llm adds.  ``unread``: the fields that
are noted.  ``refused``: field -> a part of the remedy.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.checkpoints.stacked import stored_tensors
from mcore_rl.config.model import RopeType
from mcore_rl.families.registry import FAMILIES, model_of, unread_fields
from mcore_rl.weights.table import Table
from tests.families.test_fields import refused
from tests.support.published import FACTS, meta_model, saved_shapes

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "published_configs.json").read_text(encoding="utf-8")
)
ACCEPTED = [name for name, each in PUBLISHED.items() if "unread" in each]
REFUSED = [name for name, each in PUBLISHED.items() if "refused" in each]
SUPPORTED = {architecture for family in FAMILIES.values() for architecture in family.architectures}


def test_the_corpus_is_of_sixty_checkpoints_of_supported_architectures_and_every_family() -> None:
    known = {hf_id: facts for hf_id, facts in FACTS.items() if not hf_id.startswith("tiny-")}
    known |= {name: each["config"] for name, each in PUBLISHED.items()}
    ours = [name for name, config in known.items() if set(config["architectures"]) <= SUPPORTED]
    assert len(ours) >= 60
    assert set(ACCEPTED) | set(REFUSED) == set(PUBLISHED) and not set(ACCEPTED) & set(REFUSED)
    assert all(each["source"] for each in PUBLISHED.values())
    accepted = {known[name]["model_type"] for name in [*ACCEPTED, *FACTS] if name in known}
    assert accepted >= {"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "gemma2"}


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_published_checkpoint_is_accepted_with_its_notes(name: str) -> None:
    entry = PUBLISHED[name]
    assert list(unread_fields(entry["config"])) == entry["unread"]


@pytest.mark.parametrize("name", [name for name in ACCEPTED if PUBLISHED[name]["unread"]])
def test_what_is_noted_changes_neither_transformers_model_nor_ours(name: str) -> None:
    config, unread = PUBLISHED[name]["config"], set(PUBLISHED[name]["unread"])
    without = {field: value for field, value in config.items() if field not in unread}
    assert model_of(config) == model_of(without)
    written = saved_shapes(meta_model(config))
    assert written == saved_shapes(meta_model(without))
    assert written == {tensor: info.shape for tensor, info in stored_tensors(Table(*model_of(config))).items()}


@pytest.mark.parametrize("name", REFUSED)
def test_a_published_checkpoint_is_refused_for_the_reason_that_is_stated(name: str) -> None:
    entry = PUBLISHED[name]
    refusals = refused(entry["config"])
    assert set(refusals) == set(entry["refused"])
    for field, said in entry["refused"].items():
        assert said in refusals[field].remedy


def test_one_model_is_read_as_its_publisher_means_it() -> None:
    """Facts of the model cards, where fields are easily confused."""
    coder = model_of(PUBLISHED["Qwen/Qwen3-Coder-30B-A3B-Instruct"]["config"])[1]
    assert coder.moe is not None and coder.moe.shared_ffn_hidden_size == 0 and not coder.qkv_bias and coder.qk_norm
    gemma = model_of(PUBLISHED["google/gemma-2-9b-it"]["config"])[1]
    assert gemma.sliding_window == 4096 and gemma.sliding_layers == list(range(0, 42, 2))
    smol = model_of(PUBLISHED["mlc-llm preset smollm2_360m"]["config"])[1]
    assert smol.rope.type is RopeType.default and smol.rotary_base == 100000 and smol.tie_output
