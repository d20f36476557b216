"""The presets of ``model_configs/``, planned on the machines that they are named after."""

from __future__ import annotations

import pytest

from mcore_rl.config.engine import Recompute
from mcore_rl.config.launch import cluster_names, load_cluster
from mcore_rl.config.run import RunConfig
from mcore_rl.families.checkpoints import HARDWARE, Preset, known_checkpoints, published_config
from mcore_rl.families.registry import model_of
from mcore_rl.families.towers import PICTURES
from mcore_rl.planning.plan import plan
from tests.support.published import MODEL_CONFIGS
from tests.support.settings import any_run

CLUSTERS = {cluster.presets: cluster for cluster in map(load_cluster, cluster_names()) if cluster.presets}
KNOWN = {name: each for name, each in known_checkpoints(MODEL_CONFIGS).items() if each.presets}


def run_of(preset: Preset, share: float, longest: int) -> RunConfig:
    run, per_node = any_run(), min(8, preset.num_gpus)
    run.trainer.nnodes, run.trainer.n_gpus_per_node = preset.num_gpus // per_node, per_node
    run.actor.parallel, run.actor.recompute, run.actor.microbatch_tokens = preset.training, Recompute.full, 8192
    layout = preset.rollout
    run.rollout.tp, run.rollout.dp, run.rollout.ep = layout.tp, layout.dp, layout.ep
    run.rollout.gpu_memory_utilization, run.rollout.n = share, 8
    run.data.max_prompt_length = run.rollout.max_prompt_length = longest // 4
    run.data.max_response_length = run.rollout.max_response_length = longest - longest // 4
    return run


def test_every_hardware_has_a_cluster() -> None:
    assert set(CLUSTERS) == set(HARDWARE)


@pytest.mark.parametrize("name", KNOWN)
def test_presets_fit(name: str) -> None:
    checkpoint = KNOWN[name]
    pictures = checkpoint.family in PICTURES
    _, model = model_of(published_config(checkpoint, MODEL_CONFIGS), pictures=pictures)
    for hardware, preset in checkpoint.presets.items():
        longest = min(4096, model.max_position_embeddings)
        runs = [run_of(preset, share, longest) for share in (0.6, 0.8, 0.85)]
        for run in runs if pictures else ():
            run.data.image_key = "images"
        plans = [plan(run, model, CLUSTERS[hardware]) for run in runs]
        assert any(each.fits for each in plans), (hardware, [str(each) for each in plans[0].violations])
