"""Models that see pictures against transformers' whole model: log-probs, loss and the norm of all gradients.

Float32, read from the files of a checkpoint; the tower learns, or is frozen.  transformers gets normalised pixels,
sequence by sequence; the engine gets bytes, packed, under every layout.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mcore_rl.checkpoints.convert import HF
from mcore_rl.checkpoints.load import load_hf
from mcore_rl.checkpoints.published import open_weights
from mcore_rl.checkpoints.rest import KEPT
from mcore_rl.config.engine import EngineConfig, OptimizerConfig, Recompute
from mcore_rl.config.lora import LoraConfig
from mcore_rl.config.parallel import parse_layout
from mcore_rl.config.role import Head
from mcore_rl.families.config_json import read_config
from mcore_rl.families.registry import model_of
from mcore_rl.families.towers import PICTURES
from mcore_rl.ground.types import TrainBatch
from mcore_rl.parallel.groups import ProcessGroups
from mcore_rl.parallel.launch import Rank
from mcore_rl.training.checkpoint import load_megatron, save_megatron
from mcore_rl.training.engine import Engine
from mcore_rl.training.heads import ValueHead
from mcore_rl.training.sequences import Deepstack
from mcore_rl.weights.adapter_table import AdapterTable
from mcore_rl.weights.table import Table
from tests.support import batches, engines, picture_models
from tests.support.adapters import LORA
from tests.support.forked import run_ranks

pytestmark = pytest.mark.tier("test")
LOGPROBS, NORM = 5e-6, 1e-6
CASES = [
    *((family, "", 1, Recompute.none, True) for family in PICTURES),
    ("qwen2_5_vl", "tp=2", 2, Recompute.none, True),
    ("qwen2_5_vl", "cp=2", 2, Recompute.full, True),
    ("qwen2_5_vl", "pp=2", 2, Recompute.none, True),
    ("qwen2_5_vl", "tp=2", 2, Recompute.none, False),
    ("qwen2_5_vl", "", 2, Recompute.none, True),
    ("qwen2_5_vl", "pp=2,vpp=2", 2, Recompute.none, True),
    ("qwen2_5_vl", "tp=2,cp=2", 4, Recompute.none, True),
    ("qwen3_vl", "", 1, Recompute.full, True),
    ("qwen3_vl", "tp=2", 2, Recompute.full, True),
    ("qwen3_vl", "cp=2", 2, Recompute.none, True),
    ("qwen3_vl", "pp=2", 2, Recompute.full, True),
    ("qwen3_vl", "tp=2,cp=2", 4, Recompute.none, True),
    ("qwen3_vl_moe", "tp=2,ep=2,etp=1", 2, Recompute.full, True),
]
Side = tuple[Tensor, float, float]


def _engine(
    rank: Rank,
    groups: ProcessGroups,
    directory: Path,
    layout: str,
    settings: EngineConfig,
    *,
    trained: bool = True,
    head: Head = Head.lm,
    lora: LoraConfig | None = None,
) -> tuple[Engine, TrainBatch]:
    """(the engine with the checkpoint's weights, the batch for its tower).  lora: of its adapters, if it has some."""
    family, model = model_of(read_config(directory), pictures=True)
    assert model.vision is not None
    parallel = parse_layout(layout)
    table = Table(family, model, parallel, rank.world_size, head=head)
    adapters = None if lora is None else AdapterTable(table, lora)
    engine = Engine(
        "actor",
        model,
        parallel,
        settings,
        groups,
        engines.CPU,
        train_tower=trained,
        adapters=adapters,
        head=head,
    )
    with open_weights(directory, pictures=True) as checkpoint:
        engine.load_weights(partial(load_hf, checkpoint=checkpoint, table=table, rank=rank.rank))
    return engine, picture_models.batch_of(model.vision)


def _engine_side(rank: Rank, directory: Path, layout: str, recompute: Recompute, trained: bool) -> Side:
    settings = engines.config(
        microbatch_tokens=80, recompute=recompute, optim=OptimizerConfig(lr=0.0, weight_decay=0.0, clip_grad=1.0)
    )
    with engines.world(rank), engines.groups_of(layout) as groups:
        engine, whole = _engine(rank, groups, directory, layout, settings, trained=trained)
        batch = engines.share_of(whole, groups)
        logprobs_T = engine.score(batch).logprobs_T
        step = engine.train_step(batch, picture_models.loss, batches.denominators(whole))
    assert logprobs_T is not None
    return logprobs_T, step.loss, step.grad_norm


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pictures")
    for family in PICTURES:
        picture_models.write(family, root / family, num_hidden_layers=4)
    return root


@pytest.mark.parametrize(("family", "layout", "world_size", "recompute", "trained"), CASES)
def test_scores_and_gradients_are_those_of_the_whole(
    family: str, layout: str, world_size: int, recompute: Recompute, trained: bool, checkpoints: Path, processes: None
) -> None:
    directory = checkpoints / family
    _, model = model_of(read_config(directory), pictures=True)
    assert model.vision is not None
    whole = picture_models.whole_model(directory)
    whole.model.visual.requires_grad_(trained)
    batch = picture_models.batch_of(model.vision)
    theirs_T, loss = picture_models.whole_side(whole, model.vision, batch)
    loss.backward()
    gradients = [each.grad for each in whole.parameters() if each.grad is not None]
    norm = float(torch.stack([each.double().square().sum() for each in gradients]).sum().sqrt())

    data_ranks = 1 if layout else world_size
    sides = run_ranks(_engine_side, world_size, (directory, layout, recompute, trained))
    parts = list(theirs_T.detach().split(list(batch.lengths_S)))
    for rank in range(data_ranks):
        expected_T = torch.cat(parts[rank::data_ranks])
        assert (sides[rank][0] - expected_T).abs().max() < LOGPROBS
    assert sides[0][1] == pytest.approx(float(loss.detach()), rel=1e-6)
    assert sides[0][2] == pytest.approx(norm, rel=NORM)


def _values(rank: Rank, directory: Path, layout: str, weight_H: Tensor) -> Tensor:
    """The values of an engine whose head says ``weight_H``."""
    with engines.world(rank), engines.groups_of(layout) as groups:
        engine, whole = _engine(rank, groups, directory, layout, engines.config(microbatch_tokens=80), head=Head.value)
        for head in (each for chunk in engine.models for each in chunk.modules() if isinstance(each, ValueHead)):
            head.weight.data.copy_(weight_H)
        values_T = engine.score(engines.share_of(whole, groups)).values_T
    assert values_T is not None
    return values_T


@pytest.mark.parametrize(("family", "layout"), [("qwen2_5_vl", "cp=2"), ("qwen3_vl", "pp=2"), ("qwen3_vl", "tp=2")])
def test_a_critic_sees_what_the_whole_sees(family: str, layout: str, checkpoints: Path, processes: None) -> None:
    directory = checkpoints / family
    _, model = model_of(read_config(directory), pictures=True)
    assert model.vision is not None
    weight_H = torch.randn(model.hidden_size, generator=torch.Generator().manual_seed(3))
    batch = picture_models.batch_of(model.vision)
    theirs_T = picture_models.whole_values(picture_models.whole_model(directory), model.vision, batch, weight_H)
    ours_T = run_ranks(_values, 2, (directory, layout, weight_H))[0]
    torch.testing.assert_close(ours_T, theirs_T.detach(), rtol=1e-5, atol=1e-5)


def _held(rank: Rank, directory: Path, trained: bool, lora: LoraConfig | None, recompute: Recompute) -> list[int]:
    """How many microbatches have features, whenever one enters the embedding, and after each pass."""
    held = list[int]()

    def count(*_: object) -> None:
        held.append(sum(type(each) is Deepstack for each in gc.get_objects()))

    with engines.world(rank), engines.groups_of("") as groups:
        settings = engines.config(microbatch_tokens=50, recompute=recompute)
        engine, batch = _engine(rank, groups, directory, "", settings, trained=trained, lora=lora)
        engine.models[0].embedding.register_forward_pre_hook(count)
        engine.score(batch)
        count()
        engine.train_step(batch, picture_models.loss, batches.denominators(batch))
        count()
    return held


@pytest.mark.parametrize(
    ("trained", "lora", "recompute"),
    [
        (True, None, Recompute.full),
        (False, None, Recompute.full),
        (False, LORA, Recompute.none),
        (False, LORA, Recompute.full),
    ],
)
def test_features_are_let_go_with_the_pass_of_their_microbatch(
    trained: bool, lora: LoraConfig | None, recompute: Recompute, checkpoints: Path, processes: None
) -> None:
    (held,) = run_ranks(_held, 1, (checkpoints / "qwen3_vl", trained, lora, recompute))
    assert len(held) > 6 and not any(held), held


def _saved_and_loaded(rank: Rank, directory: Path, out: Path) -> bool:
    """Whether what a twin loads of an engine's Megatron checkpoint are its weights, the tower's too."""
    with engines.world(rank), engines.groups_of("") as groups:
        engine, _ = _engine(rank, groups, directory, "", engines.config(microbatch_tokens=80), trained=True)
        save_megatron(engine.models, out, source=directory)
        twin = Engine("actor", engine.model, parse_layout(""), engine.config, groups, engines.CPU)
        twin.load_weights(partial(load_megatron, directory=out, model=engine.model))
        held, loaded = (dict(each.models[0].named_parameters()) for each in (engine, twin))
    return all(torch.equal(weight, loaded[name]) for name, weight in held.items())


def test_a_checkpoint_has_the_trained_tower_and_no_other(checkpoints: Path, tmp_path: Path, processes: None) -> None:
    assert run_ranks(_saved_and_loaded, 1, (checkpoints / "qwen3_vl", tmp_path / "out")) == [True]
    assert not (tmp_path / "out" / HF / KEPT).exists()


def test_a_token_of_pictures_that_somebody_wrote_is_text(checkpoints: Path, processes: None) -> None:
    """Where pictures stand is said by place: transformers is told so by another token for them."""
    directory = checkpoints / "qwen3_vl"
    _, model = model_of(read_config(directory), pictures=True)
    assert model.vision is not None
    batch = picture_models.literal(picture_models.batch_of(model.vision))
    assert batch.feature_T is not None
    whole, other = picture_models.whole_model(directory), picture_models.PICTURE + 1
    for config in (whole.config, whole.model.config):
        config.image_token_id, config.video_token_id = other, picture_models.PICTURE + 2
    told = replace(batch, tokens_T=torch.where(batch.feature_T >= 0, other, batch.tokens_T))
    theirs_T, _ = picture_models.whole_side(whole, model.vision, told)
    (ours_T,) = run_ranks(_scored, 1, (directory, batch))
    text_T = batch.feature_T < 0
    assert (ours_T - theirs_T.detach())[text_T].abs().max() < LOGPROBS


def _scored(rank: Rank, directory: Path, batch: TrainBatch) -> Tensor:
    with engines.world(rank), engines.groups_of("") as groups:
        engine, _ = _engine(rank, groups, directory, "", engines.config(microbatch_tokens=80), trained=False)
        logprobs_T = engine.score(batch).logprobs_T
    assert logprobs_T is not None
    return logprobs_T


def _steps(rank: Rank, directory: Path, parts: list[list[list[int]]], overlap: bool) -> list[float]:
    settings = engines.config(microbatch_tokens=80, overlap_grad_reduce=overlap, optim=OptimizerConfig(lr=1e-3))
    norms = []
    with engines.world(rank), engines.groups_of("") as groups:
        engine, whole = _engine(rank, groups, directory, "", settings, trained=True)
        for part in parts:
            batch = whole.select(part[groups.coords.dp])
            norms.append(engine.train_step(batch, picture_models.loss, batches.denominators(whole)).grad_norm)
    return norms


def test_ranks_without_a_picture_take_part_in_every_reduction(checkpoints: Path, processes: None) -> None:
    """Overlapped reductions: Megatron wants a gradient of each parameter that it saw in the first step."""
    pictures, text = [0, 2, 3, 4, 5], [1]
    parts = [[pictures, text], [text, pictures]]
    sides = [run_ranks(_steps, 2, (checkpoints / "qwen3_vl", parts, overlap))[0] for overlap in (False, True)]
    assert sides[0] == pytest.approx(sides[1], rel=1e-6)
