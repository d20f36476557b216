"""The text part of a multimodal checkpoint against transformers' whole model: log-probs, loss and every gradient.

The whole model reads text alone; its positions of three axes, windows and masks are its own.  Float32 on both sides,
read from the files of a checkpoint; the bound is that of ``test_transformers.py``.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mcore_rl.checkpoints.export import export_stream
from mcore_rl.checkpoints.load import load_hf
from mcore_rl.checkpoints.published import open_weights
from mcore_rl.config.engine import Device, OptimizerConfig
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.families.config_json import read_config
from mcore_rl.families.registry import model_of
from mcore_rl.parallel.device import detect, device_of
from mcore_rl.parallel.groups import destroy_groups, init_groups
from mcore_rl.parallel.launch import Rank
from mcore_rl.parallel.layout import Layout
from mcore_rl.training.engine import Engine
from mcore_rl.weights.table import Table
from tests.invariance.problems import Case, Problem
from tests.support import batches, text_parts
from tests.support.engine_runs import engine_config
from tests.support.forked import run_ranks
from tests.support.text_parts import TEXT, TOKENS_OF_TEXT

pytestmark = pytest.mark.tier("test")
TOLERANCE = 1e-5
# A delta net's output is near 0 where a query and its keys are orthogonal: by 1e-6, rounding is seen in gradients, as
# in ``models.qwen3_next``.
CHANGES: dict[str, dict[str, object]] = {
    name: {"rms_norm_eps": 1e-2} if name.startswith("Qwen3_5") else {} for name in TEXT
}
Side = tuple[Tensor, Tensor, float, dict[str, Tensor]]


def _engine_side(rank: Rank, root: Path) -> dict[str, Side]:
    platform = detect(Device.cpu)
    rank.init_process_group(platform)
    groups = init_groups(Layout.of(ParallelConfig(), 1), platform, device_of(platform, 0), seed=1)
    results = {}
    for name in TEXT:
        family, model = model_of(read_config(root / name))
        config = engine_config(Case(problem=Problem(model="llama")))
        config.optim = OptimizerConfig(lr=0.0, weight_decay=0.0, clip_grad=0.0)
        engine = Engine("actor", model, ParallelConfig(), config, groups, platform)
        table = Table(family, model)
        with open_weights(root / name) as checkpoint:
            engine.load_weights(partial(load_hf, checkpoint=checkpoint, table=table, rank=0))
        batch = batches.ragged(TOKENS_OF_TEXT)
        scores = engine.score(batch)
        step = engine.train_step(batch, batches.policy_loss, batches.denominators(batch), with_entropy=True)
        for parameter in engine.models[0].parameters():
            parameter.data.copy_(parameter.main_grad)
        gradients = {key: tensor for bucket in export_stream(engine.models, table, 0) for key, tensor in bucket}
        assert scores.logprobs_T is not None and scores.entropy_T is not None
        results[name] = (scores.logprobs_T, scores.entropy_T, step.loss, gradients)
    destroy_groups()
    return results


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, PreTrainedModel]]:
    root = tmp_path_factory.mktemp("wholes")
    return root, {name: text_parts.write(name, root / name, **CHANGES[name]) for name in TEXT}


@pytest.fixture(scope="module")
def engine_side(models: tuple[Path, dict[str, PreTrainedModel]], processes: None) -> dict[str, Side]:
    return run_ranks(_engine_side, 1, (models[0],))[0]


def _gradients(whole: PreTrainedModel) -> dict[str, Tensor]:
    """Those of the language model in ``whole``, by the names that it has alone, experts one by one."""
    made = dict[str, Tensor]()
    for name, parameter in whole.named_parameters():
        if not name.startswith(("model.language_model.", "lm_head.")):
            assert parameter.grad is None or not parameter.grad.any(), f"{name}: text reaches the tower"
            continue
        assert parameter.grad is not None, name
        inner = name.replace("model.language_model.", "model.", 1)
        if inner.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            parts = ("gate_proj", "up_proj") if inner.endswith("gate_up_proj") else ("down_proj",)
            folder = inner.rpartition(".")[0]
            for number, expert in enumerate(parameter.grad):
                for part, rows in zip(parts, expert.chunk(len(parts)), strict=True):
                    made[f"{folder}.{number}.{part}.weight"] = rows
        else:
            made[inner] = parameter.grad
    return made


@pytest.mark.parametrize("name", TEXT)
def test_scores_loss_and_gradients_are_those_of_the_whole(
    name: str, engine_side: dict[str, Side], models: tuple[Path, dict[str, PreTrainedModel]]
) -> None:
    whole = models[1][name]
    logprobs_T, entropy_T, loss, gradients = engine_side[name]
    batch = batches.ragged(TOKENS_OF_TEXT)
    their_logprobs_T, their_entropy_T, their_loss = batches.whole_loss(lambda tokens: whole(tokens).logits, batch)
    their_loss.backward()
    torch.testing.assert_close(logprobs_T, their_logprobs_T.detach(), rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(entropy_T, their_entropy_T.detach(), rtol=TOLERANCE, atol=TOLERANCE)
    assert loss == pytest.approx(float(their_loss.detach()), rel=TOLERANCE)
    theirs = _gradients(whole)
    assert {key for key in gradients if "correction_bias" not in key} == theirs.keys()
    for key, gradient in theirs.items():
        error = (gradients[key] - gradient).norm() / gradient.norm().clamp(min=1e-12)
        assert error < TOLERANCE, f"{key}: relative error {error:.1e}"


def test_positions_of_three_axes_that_are_equal_rotate_as_one(
    models: tuple[Path, dict[str, PreTrainedModel]],
) -> None:
    """transformers' rotation of Qwen-VL against the plain one, frequency by frequency, to the bit."""
    for name in ("Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration"):
        rotary = models[1][name].model.language_model.rotary_emb
        positions = torch.arange(97)
        cos, sin = rotary(torch.zeros(1), positions.expand(3, 1, -1))
        angles = positions[:, None].float() * rotary.inv_freq
        cos, sin = (value.reshape(-1, 97, value.shape[-1])[0] for value in (cos, sin))
        assert torch.equal(cos[:, : angles.shape[1]], angles.cos()) and torch.equal(
            cos[:, angles.shape[1] :], angles.cos()
        )
        assert torch.equal(sin[:, : angles.shape[1]], angles.sin())
