"""A run whose one engine is on two nodes of a Ray cluster, killed on either: it ends with the bits of a calm one.

Both nodes are on this machine.  Rank 0 of the engine is on one with training rank 0, rank 1 on the other with training
rank 1, which receives its weights there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from ray.cluster_utils import Cluster

from mcore_rl.rollout.vllm.engine.process_group import is_tracker
from tests.support.crash_runs import Started, Traces, bits_of, doing, drawing, says, start
from tests.support.run_task import holders_of, write_task

pytestmark = pytest.mark.tier("full")
TWO_NODES = ("trainer.nnodes=2", "trainer.n_gpus_per_node=1", "rollout.tp=2")
ENGINE, PART = "engine-0.log", "engine-0-node-1.log"


@pytest.fixture
def ray_of_two_nodes(processes: None) -> Iterator[str]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    cluster.add_node(num_cpus=2)
    yield cluster.address
    cluster.shutdown()


def holders(run: Started, log: str) -> list[psutil.Process]:
    """The processes of an engine on a node; Ray's are their parents, and this one's children."""
    return [each for each in holders_of(run.directory / "logs" / log) if not is_tracker(each)]


@pytest.mark.timeout(2400)  # two runs, one with three restarts, on a busy machine
def test_deaths_on_either_node_change_no_bit(ray_of_two_nodes: str, tmp_path: Path) -> None:
    task, settings = write_task(tmp_path), (*TWO_NODES, f"ray_init.address={ray_of_two_nodes}")
    calm = start(task, tmp_path / "calm", Traces(), *settings)
    calm.until(drawing(2))
    assert holders(calm, ENGINE) and holders(calm, PART)
    assert calm.finish() == 0, calm.said()

    run = start(task, tmp_path / "run", Traces(), *settings)
    blows = ((drawing(2), PART), (doing(2, "publish"), PART), (drawing(3), ENGINE))
    for which, (moment, log) in enumerate(blows, start=1):
        run.until(moment)
        run.heard = run.output.stat().st_size
        for victim in holders(run, log):
            with suppress(psutil.NoSuchProcess):
                victim.kill()
        run.until(says(rf"engine 0: started again, {which} of 3(.|\n)*engine 0: ready after"))
        if log is PART:
            assert says(r"engine 0 died while .*: engine 0 \(node 1\) died while serving")(run), run.said()
    assert run.finish() == 0, run.said()
    ours, theirs = bits_of(tmp_path / "run"), bits_of(tmp_path / "calm")
    assert ours.metrics == theirs.metrics and ours.rollouts == theirs.rollouts
    assert ours.states == theirs.states and ours.states
    assert not holders(run, ENGINE) and not holders(run, PART), "nothing is left of an engine"
