"""Where processes stand: Ray is told of accelerators that are not there, which is all that placing needs."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from ray.util import placement_group_table

from mcore_rl.config.engine import Device
from mcore_rl.config.rollout import RolloutLayout
from mcore_rl.config.trainer import Placement, TrainerConfig
from mcore_rl.ground.errors import ConfigError
from mcore_rl.parallel.device import Platform, detect
from mcore_rl.runtime import placement
from mcore_rl.runtime.placement import Bundle, EngineBundles, place, placement_violations
from mcore_rl.weights.sites import Sites
from tests.support.answerers import Talker

CPU = detect(Device.cpu)


class Accelerated:
    """As far as placing is concerned."""

    is_accelerator = True


ACCELERATOR: Platform = Accelerated()  # type: ignore[assignment]


@pytest.fixture(scope="module")
def cluster(processes: None) -> Iterator[None]:
    ray.init(address="local", num_cpus=8, num_gpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def seats(bundles: Sequence[Bundle]) -> list[tuple[str, int]]:
    return [(bundle.group.id.hex(), bundle.index) for bundle in bundles]


def firsts(engines: Sequence[EngineBundles]) -> list[tuple[str, int]]:
    """The places of engines, each of which is on one node."""
    return seats([bundle for (bundle,) in engines])


def sizes(bundle: Bundle) -> dict[str, float]:
    table = placement_group_table(bundle.group)
    return {key: value for key, value in table["bundles"][bundle.index].items() if value}


def test_colocated_engines_take_turns_with_the_ranks_they_stand_on(cluster: None) -> None:
    trainer = TrainerConfig(n_gpus_per_node=4)
    places = asyncio.run(place(trainer, RolloutLayout(tp=2, dp=2), ACCELERATOR))
    train, rollout = seats(places.train), firsts(places.rollout)
    assert len(set(train)) == 4 and [index for _, index in train] == [0, 1, 2, 3]
    assert rollout == [train[0], train[2]]
    assert sizes(places.train[3]) == {"CPU": 1.0, "GPU": 1.0}
    assert 0 < places.share <= 1 / 3, "three roles share a device"
    places.close()


def test_separate_engines_have_devices_of_their_own(cluster: None) -> None:
    trainer = TrainerConfig(n_gpus_per_node=2, placement=Placement.separate)
    places = asyncio.run(place(trainer, RolloutLayout(tp=2), ACCELERATOR))
    assert not set(seats(places.train)) & set(firsts(places.rollout))
    assert sizes(places.rollout[0][0]) == {"CPU": 2.0, "GPU": 2.0}
    places.close()


def test_a_reward_model_stands_where_rollout_engines_would(cluster: None) -> None:
    trainer = TrainerConfig(n_gpus_per_node=4)
    places = asyncio.run(place(trainer, RolloutLayout(tp=4), ACCELERATOR, {"reward_model": RolloutLayout(tp=2, dp=2)}))
    assert firsts(places.rollout) == seats(places.train)[:1]
    assert firsts(places.scorers["reward_model"]) == [seats(places.train)[0], seats(places.train)[2]]
    places.close()
    apart = TrainerConfig(n_gpus_per_node=1, placement=Placement.separate)
    places = asyncio.run(place(apart, RolloutLayout(), ACCELERATOR, {"reward_model": RolloutLayout(tp=2)}))
    assert len({*seats(places.train), *firsts(places.rollout), *firsts(places.scorers["reward_model"])}) == 3
    assert sizes(places.rollout[0][0])["GPU"] == 1.0 and sizes(places.scorers["reward_model"][0][0])["GPU"] == 2.0
    places.close()
    places = asyncio.run(place(trainer, RolloutLayout(), CPU, {"reward_model": RolloutLayout(dp=2)}))
    assert firsts(places.scorers["reward_model"]) == seats(places.train)[:2]
    places.close()
    places = asyncio.run(place(trainer, RolloutLayout(), CPU))
    assert places.scorers == {}
    places.close()
    with pytest.raises(ConfigError, match=r"reward_model\.dp=3: with reward_model\.tp=2 needs 6 devices"):
        asyncio.run(place(trainer, RolloutLayout(), ACCELERATOR, {"reward_model": RolloutLayout(tp=2, dp=3)}))


def test_sites_are_the_nodes_that_ray_chose(cluster: None) -> None:
    places = asyncio.run(place(TrainerConfig(n_gpus_per_node=4), RolloutLayout(tp=2, dp=2), ACCELERATOR))
    assert places.sites(RolloutLayout(tp=2, dp=2), Placement.colocated) == Sites.colocated((0,) * 4, 4)
    places.close()
    places = asyncio.run(place(TrainerConfig(n_gpus_per_node=2), RolloutLayout(dp=3), CPU))
    assert places.sites(RolloutLayout(dp=3), Placement.colocated) == Sites((0, 0), (0,) * 3, (0, 1, 0))
    assert places.sites(RolloutLayout(dp=3), Placement.separate) == Sites((0, 0), (0,) * 3)
    places.close()


def test_what_was_reserved_is_given_back(cluster: None) -> None:
    for _ in range(3):  # each of them takes all there is
        asyncio.run(place(TrainerConfig(n_gpus_per_node=4), RolloutLayout(), ACCELERATOR)).close()


def test_on_cpu_all_share_the_cores(cluster: None, tmp_path: Path) -> None:
    trainer = TrainerConfig(n_gpus_per_node=3)
    places = asyncio.run(place(trainer, RolloutLayout(dp=4), CPU))
    assert len(places.train) == 3
    assert firsts(places.rollout) == [seats(places.train)[rank] for rank in (0, 1, 2, 0)]
    actor = ray.remote(Talker).options(**places.train[1].options({"num_cpus": 0})).remote(1, tmp_path / "log")
    assert ray.get(actor.pid.remote()) != os.getpid()
    ray.kill(actor)
    places.close()


def test_more_than_there_is_is_refused_in_time(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "WAIT_S", 0.5)
    with pytest.raises(ConfigError) as error:
        asyncio.run(place(TrainerConfig(n_gpus_per_node=5), RolloutLayout(), ACCELERATOR))
    said = str(error.value)
    assert "trainer.nnodes" in said and "1 nodes of 5 accelerators each were not free within 0.5 s" in said
    assert "the cluster has" in said and "4 GPU" in said and "8 CPU" in said
    asyncio.run(place(TrainerConfig(n_gpus_per_node=4), RolloutLayout(), ACCELERATOR)).close()  # nothing is held


def test_an_interrupted_wait_leaves_nothing_for_python_to_print(cluster: None) -> None:
    """A Ctrl-C cancels the wait for devices that are not free."""
    heard: list[str] = []

    async def interrupted() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context["message"]))
        placing = asyncio.ensure_future(place(TrainerConfig(n_gpus_per_node=5), RolloutLayout(), ACCELERATOR))
        await asyncio.sleep(0.5)
        placing.cancel()
        await asyncio.wait([placing])
        assert placing.cancelled()

    asyncio.run(interrupted())
    gc.collect()
    assert heard == []


def test_engines_that_do_not_fit_on_the_trainer_s_devices_are_refused(cluster: None) -> None:
    trainer = TrainerConfig(n_gpus_per_node=4)
    (wide,) = placement_violations(trainer, RolloutLayout(tp=2, dp=3), ACCELERATOR)
    assert str(wide) == (
        "rollout.dp=3: with rollout.tp=2 needs 6 devices of the trainer's 4. "
        "Write rollout.dp=2, or trainer.placement=separate"
    )
    (odd,) = placement_violations(trainer, RolloutLayout(tp=3), ACCELERATOR)
    assert odd.key == "rollout.tp" and "neither divides trainer.n_gpus_per_node=4 nor takes whole nodes" in str(odd)
    fits = RolloutLayout(tp=2, dp=2)
    assert placement_violations(trainer, fits, ACCELERATOR) == []
    assert placement_violations(replace(trainer, placement=Placement.separate), RolloutLayout(dp=9), ACCELERATOR) == []
    assert placement_violations(trainer, RolloutLayout(tp=2, dp=3), CPU) == []
