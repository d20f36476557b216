"""Settings of pictures that nothing reads, or that contradict each other, are refused with the remedy."""

from __future__ import annotations

import re

import pytest

from mcore_rl.config.compose import compose
from mcore_rl.config.offline import OfflineConfig
from mcore_rl.config.prefer import PreferConfig
from mcore_rl.config.reward_training import RewardTrainingConfig
from mcore_rl.config.run import RunConfig, run_violations
from mcore_rl.config.sft import SftConfig

DATA = ["model.path=m", "data.train_files=[t.parquet]"]
SEEN = "data.image_key=images"
CASES = {
    "data.max_images=2": "data.max_images=2: is not read: .*data.image_key=images",
    "data.image_max_pixels=5000": "data.image_max_pixels=5000: is not read",
    "data.mean_image_tokens=200": "data.mean_image_tokens=200: is not read",
    f"{SEEN} data.mean_image_tokens=9999": r"data.mean_image_tokens=9999: is more than data.max_(prompt_)?length=",
    f"{SEEN} data.image_max_pixels=3000": "data.image_min_pixels=3136: exceeds data.image_max_pixels=3000",
    "actor.vision=frozen": "actor.vision=frozen: is not read: .*data.image_key=images",
    "actor.microbatch_patches=64": "actor.microbatch_patches=64: is not read",
    f"{SEEN} actor.vision=trained actor.lora.rank=4": "actor.vision=trained: and actor.lora.rank=4 trains adapters",
    f"{SEEN} actor.microbatch_tokens=null actor.microbatch_sequences=1": (
        "actor.microbatch_sequences=1: leaves sequences unpacked, .*Write actor.microbatch_tokens=16384"
    ),
}
OF_RUNS = {
    f"{SEEN} reward_model.enable=true": "data.image_key=images: gives the policy pictures, and the reward model .*text",
    "algorithm=ppo critic.vision=frozen": "critic.vision=frozen: is not read: .*data.image_key=images",
    f"{SEEN} algorithm=ppo critic.vision=trained critic.lora.rank=4": "critic.vision=trained: and critic.lora.rank=4",
    f"{SEEN} algorithm=spin": "data.image_key=images: .* the rows' own answers",
    "algorithm=ppo critic.microbatch_patches=64": "critic.microbatch_patches=64: is not read",
}


@pytest.mark.parametrize("written", CASES)
def test_sft_refuses(written: str) -> None:
    violations = compose(SftConfig, "sft", [*DATA, *written.split()]).violations()
    assert len(violations) == 1
    assert re.search(CASES[written], str(violations[0])), violations


@pytest.mark.parametrize("written", CASES | OF_RUNS)
def test_train_refuses(written: str) -> None:
    violations = run_violations(compose(RunConfig, "train", [*DATA, *written.split()]))
    wanted = (CASES | OF_RUNS)[written]
    assert any(re.search(wanted, str(each)) for each in violations), violations


def test_a_critic_may_see_what_the_policy_sees() -> None:
    config = compose(RunConfig, "train", [*DATA, SEEN, "algorithm=ppo", "critic.vision=frozen"])
    assert not [each for each in run_violations(config) if "image" in str(each)]


@pytest.mark.parametrize(("schema", "command"), [(PreferConfig, "prefer"), (RewardTrainingConfig, "reward")])
def test_what_trains_beside_says_nothing_of_a_key_that_it_lacks(schema: type[OfflineConfig], command: str) -> None:
    (violation,) = compose(schema, command, [*DATA, "actor.microbatch_patches=64"]).violations()
    assert violation.key == "actor.microbatch_patches" and violation.remedy == "Leave it out"


def test_the_tower_is_trained_unless_adapters_are() -> None:
    for written, trains in (("", True), ("actor.vision=frozen", False), ("actor.lora.rank=4", False)):
        config = compose(SftConfig, "sft", [*DATA, SEEN, *written.split()])
        assert config.violations() == [] and config.actor.trains_tower is trains
