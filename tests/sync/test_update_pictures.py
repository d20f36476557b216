"""Updates of models that see pictures, in place: the language model and the tower, from an engine that read nothing.

Such an engine starts on random weights, normalises pixels by the model's numbers all the same, and after an update
forgets the features of the old tower: also in samples under way, which go on with the new weights.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rollout import parse_rollout_layout
from mcore_rl.families.config_json import read_config
from mcore_rl.families.registry import model_of
from mcore_rl.rollout.protocol import Pause, Prompt, Sample, Sampling, requests_of
from mcore_rl.rollout.vllm.engine.process import EngineProcess
from mcore_rl.rollout.vllm.worker_methods import WEIGHT_RECEIVER
from mcore_rl.sync.update import WeightUpdater
from tests.support import picture_models, rollouts, seen_prompts
from tests.support.forked import start_engine
from tests.support.live_trainers import LiveTrainers

ATOL = 1e-5  # float32: of log-probs after an update, as of models of text
DRAWN = Sampling(max_tokens=6, ignore_eos=True, seed=3)
LONG = Sampling(max_tokens=200, ignore_eos=True, seed=3)


def two_checkpoints(family: str, root: Path) -> tuple[Path, Path]:
    """Write two of one architecture, with other weights everywhere."""
    a, b = root / "a", root / "b"
    picture_models.write(family, a)
    (a / "tokenizer.json").unlink()
    shutil.copytree(a, b)
    noise = torch.Generator().manual_seed(3)
    for file in sorted(b.glob("*.safetensors")):
        weights = load_file(file)
        other = {name: tensor + 0.05 * torch.randn(tensor.shape, generator=noise) for name, tensor in weights.items()}
        save_file(other, file, metadata={"format": "pt"})
    return a, b


class WholeModels:
    """Compares samples with transformers' models of the two checkpoints."""

    def __init__(self, model: ModelConfig, a: Path, b: Path) -> None:
        assert model.vision is not None
        self.vision = model.vision
        self.prompts = seen_prompts.prompts(model.vision)
        self.a, self.b = seen_prompts.whole_model(a), seen_prompts.whole_model(b)

    def mixed(self) -> PreTrainedModel:
        """The language model of b behind the tower of a."""
        self.b.model.visual.load_state_dict(self.a.model.visual.state_dict())
        return self.b

    def compare(self, sample: Sample, prompt: Prompt, by_version: dict[int, PreTrainedModel]) -> None:
        """Compare each token with the model of the version that drew it."""
        for span in sample.versions:
            expected = seen_prompts.whole_logprobs(
                by_version[span.version], self.vision, prompt, sample.tokens.tolist()
            )[span.start : span.end]
            drawn = sample.logprobs[span.start : span.end]
            np.testing.assert_allclose(drawn, expected, rtol=0, atol=ATOL, err_msg=f"{prompt.id} {span}")

    async def all(self, engine: EngineProcess, by_version: dict[int, PreTrainedModel]) -> None:
        """Compares a new sample of every prompt."""
        drawn = await rollouts.collect(engine, requests_of(self.prompts, 1), DRAWN)
        for prompt in self.prompts:
            self.compare(drawn[prompt.id, 0], prompt, by_version)


@pytest.mark.parametrize(
    ("family", "rollout"),
    [
        ("qwen3_vl", "tp=1"),
        *(
            pytest.param(*case, marks=pytest.mark.tier("full"))
            for case in (("qwen2_5_vl", "tp=2"), ("qwen3_vl", "tp=2"), ("qwen3_vl_moe", "tp=1"))
        ),
    ],
)
def test_updates_bring_the_tower_and_forget_what_the_old_one_saw(
    family: str, rollout: str, trainers: LiveTrainers, tmp_path: Path
) -> None:
    a, b = two_checkpoints(family, tmp_path)
    _, model = model_of(read_config(a), pictures=True)
    layout = parse_rollout_layout(rollout)
    config = rollouts.config(tp=layout.tp, max_prompt_length=56, max_response_length=200)
    with start_engine("seeing", a, config, extension=WEIGHT_RECEIVER, awaits_weights=True, pictures=True) as engine:
        asyncio.run(_updates(family, model, rollout, trainers, engine, (a, b)))


async def _updates(
    family: str,
    model: ModelConfig,
    rollout: str,
    trainers: LiveTrainers,
    engine: EngineProcess,
    weights: Sequence[Path],
) -> None:
    a, b = weights
    whole = WholeModels(model, a, b)
    await trainers.build(family, model, "tp=2", a, rollout)
    sync = WeightUpdater([engine], parse_rollout_layout(rollout), trainers)
    first = await sync.update(1)  # checks every weight, too
    await whole.all(engine, {1: whole.a})

    await trainers.order("load", b)
    long = whole.prompts[0]
    drawing = asyncio.ensure_future(rollouts.collect(engine, requests_of([long], 2), LONG))
    await rollouts.until_running(engine, 2)
    await sync.update(2, Pause.keep)
    kept = await drawing
    for index in range(2):
        sample = kept[long.id, index]
        assert [span.version for span in sample.versions] == [1, 2], "the update came amid the sample"
        whole.compare(sample, long, {1: whole.a, 2: whole.b})
    await whole.all(engine, {2: whole.b})
    await sync.check()

    await trainers.build(family, model, "tp=2", a, rollout, frozen_tower=True)
    sync = WeightUpdater([engine], parse_rollout_layout(rollout), trainers)
    again = await sync.update(3)
    await whole.all(engine, {3: whole.a})
    await trainers.order("load", b)
    later = await sync.update(4)
    await whole.all(engine, {4: whole.mixed()})
    sent = [sum(each.num_bytes for each in one) for one in (first, again, later)]
    assert sent[0] == sent[1] > sent[2] > 0
