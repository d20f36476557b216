"""Which engines fit on the accelerators of nodes: those on a part of one, and those on whole ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mcore_rl.config.placement import engine_nodes, engine_place_violations, with_replicas
from mcore_rl.config.rollout import RolloutConfig, RolloutLayout
from mcore_rl.config.run import RunConfig
from mcore_rl.config.sft import SftConfig
from mcore_rl.config.trainer import Placement, TrainerConfig

ONE = RolloutConfig()
TRAINER = TrainerConfig(nnodes=4, n_gpus_per_node=8)
SEPARATE = replace(TRAINER, placement=Placement.separate)


@pytest.mark.parametrize(
    ("rollout", "trainer", "dp"),
    [
        (ONE, TRAINER, 32),
        (replace(ONE, tp=4), TRAINER, 8),
        (replace(ONE, tp=16), TRAINER, 2),
        (replace(ONE, tp=4, ep=4), TRAINER, 8),  # experts inside a replica
        (replace(ONE, tp=4, ep=16), TRAINER, 4),  # one engine, whose experts are over four replicas
        (replace(ONE, tp=64), TRAINER, 1),  # refused elsewhere
        (replace(ONE, dp=3), TRAINER, 3),  # written
        (ONE, SEPARATE, 1),
    ],
)
def test_engines_take_all_devices_of_the_trainer_unless_told_otherwise(
    rollout: RolloutConfig, trainer: TrainerConfig, dp: int
) -> None:
    run = RunConfig(rollout=rollout, trainer=trainer)
    assert with_replicas(run, on_accelerators=True).rollout == replace(rollout, dp=dp)
    assert with_replicas(run, on_accelerators=False).rollout.layout.dp == (rollout.dp or 1), "cores are shared"


def test_fine_tuning_has_no_engines() -> None:
    config = SftConfig()
    assert with_replicas(config, on_accelerators=True) is config


@pytest.mark.parametrize(
    ("layout", "nodes"),
    [
        (RolloutLayout(tp=4, dp=8), 1),
        (RolloutLayout(tp=8, dp=4), 1),
        (RolloutLayout(tp=16, dp=2), 2),
        (RolloutLayout(tp=32), 4),
        (RolloutLayout(tp=8, dp=2, ep=16), 2),  # a replica on each node
        (RolloutLayout(tp=4, dp=4, ep=16), 2),  # two replicas on each
        (RolloutLayout(tp=16, dp=2, ep=32), 4),  # each replica on two
    ],
    ids=str,
)
def test_engines_on_a_part_of_a_node_or_on_whole_nodes(layout: RolloutLayout, nodes: int) -> None:
    assert engine_place_violations(TRAINER, layout) == engine_place_violations(SEPARATE, layout, per_node=8) == []
    assert engine_nodes(layout, 8) == nodes


@pytest.mark.parametrize(
    ("layout", "fits_apart"),
    [
        (RolloutLayout(tp=3, dp=8), True),  # five devices of a node are another's
        (RolloutLayout(tp=12, dp=2), False),
        (RolloutLayout(tp=2, dp=6, ep=12), False),
        (RolloutLayout(tp=3, dp=8, ep=24), False),  # whole nodes, and replicas that they cut
    ],
    ids=str,
)
def test_other_engines_are_refused_with_the_key_and_the_remedy(layout: RolloutLayout, fits_apart: bool) -> None:
    (only,) = engine_place_violations(TRAINER, layout)
    assert str(only) == (
        f"rollout.tp={layout.tp}: an engine of {layout.engine_size} devices neither divides trainer.n_gpus_per_node=8 "
        "nor takes whole nodes. Write a divisor or a multiple of 8"
    )
    apart = [str(each) for each in engine_place_violations(SEPARATE, layout, "reward_model", per_node=8)]
    said = (
        f"reward_model.tp={layout.tp}: an engine of {layout.engine_size} devices neither fits on the 8 accelerators of "
        "a node nor takes whole nodes. Write a divisor or a multiple of 8"
    )
    assert apart == ([] if fits_apart else [said])
    assert engine_place_violations(SEPARATE, layout) == [], "the nodes of its engines are not known"


def test_engines_of_more_devices_than_there_are() -> None:
    (many,) = engine_place_violations(TRAINER, RolloutLayout(tp=16, dp=3))
    assert many.key == "rollout.dp" and many.remedy.startswith("Write rollout.dp=2, or")
    (wide,) = engine_place_violations(TRAINER, RolloutLayout(tp=64))
    assert str(wide) == (
        "rollout.tp=64: an engine needs 64 devices of the trainer's 32. "
        "Write rollout.tp=32 or less, more trainer.nnodes, or trainer.placement=separate"
    )
    assert engine_place_violations(SEPARATE, RolloutLayout(tp=64), per_node=8) == []
