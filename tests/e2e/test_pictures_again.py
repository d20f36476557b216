"""Runs that see pictures, once more: killed and resumed, replayed without engines, and with more samples of a prompt.

From the command line, with real engines; a replay reads the pictures from the rows, by the hashes that were recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from signal import SIGKILL

import pytest
import ray
from ray._private.internal_api import get_memory_info_reply

from mcore_rl.cli import main
from tests.support import picture_runs, prompt_files
from tests.support.ahead_runs import same_training
from tests.support.crash_runs import Started, Traces, bits_of, doing, launch, nothing_survives
from tests.support.picture_runs import PROMPTS, STEPS
from tests.support.pictures import picture
from tests.support.run_task import nothing_left

pytestmark = [pytest.mark.tier("full"), pytest.mark.timeout(1800), pytest.mark.usefixtures("processes")]
FAMILY = "qwen2_5_vl"
# A replay validates nothing.
RESUMABLE = ("trainer.save_freq=1", "trainer.val_before_train=false", "trainer.test_freq=0")
RECORD = "trainer.record_rollouts=true"


def test_a_killed_run_goes_on_with_the_same_bits_and_is_replayed_without_engines(tmp_path: Path) -> None:
    """Killed amid the second step; a replay trains on what the first run drew, and on no other pictures than it."""
    task = picture_runs.write_task(tmp_path / "task", FAMILY)
    with nothing_survives(tmp_path) as traces:

        def begin(name: str, *more: str) -> Started:
            return _started(task, tmp_path / name, traces, *more)

        whole = begin("whole", RECORD)
        assert whole.finish() == 0, whole.said()
        struck = begin("struck", RECORD)
        struck.strike_at(doing(2, "train_step"), "controller", SIGKILL)
        assert struck.finish() == -SIGKILL
        struck = begin("struck", RECORD)
        assert struck.finish() == 0, struck.said()
        expected, again = bits_of(tmp_path / "whole", STEPS), bits_of(tmp_path / "struck", STEPS)
        assert again.states == expected.states and len(again.states) > 1
        assert again == expected

        replay = f"trainer.replay={tmp_path / 'whole'}"
        replayed = begin("replayed", replay)
        assert replayed.finish() == 0, replayed.said()
        assert not [*(tmp_path / "replayed" / "logs").glob("engine-*")], "no engine was started"
        same_training(tmp_path / "whole", tmp_path / "replayed", STEPS)

        others = picture_runs.exchanged(task / "squares" / "train.parquet", tmp_path / "others.parquet")
        refused = begin("refused", replay, f"data.train_files=[{others}]")
        assert refused.finish() == 2, refused.said()
        assert "are other data than those of the run that trainer.replay names" in " ".join(refused.said().split())
        assert "Traceback" not in refused.said()


def _started(task: Path, directory: Path, traces: Traces, *more: str) -> Started:
    return launch(picture_runs.words(task, directory, *RESUMABLE, *more), directory, traces)


SIDE = 280  # pixels: 400 patches of 1,176 bytes
PICTURE_BYTES = 400 * 1176


def test_the_store_holds_a_picture_once_for_all_samples_of_its_prompt(tmp_path: Path, fast_ray: None) -> None:
    """The most that Ray's store has, with 1 and with 8 samples of each prompt: a copy a sample would be 7 times more.

    Two more of each may be there still: on their way to the engine, and those of the step.
    """
    task = picture_runs.write_task(tmp_path / "task", FAMILY)
    rows = [
        prompt_files.row("<image>?", data_source="squares", images=[{"bytes": picture(SIDE, SIDE, n), "path": None}])
        for n in range(PROMPTS)
    ]
    large = prompt_files.write(tmp_path / "large.parquet", rows)
    most = dict[int, int]()
    for samples in (1, 8):
        more = [
            f"data.train_files=[{large}]",
            f"rollout.n={samples}",
            "rollout.max_num_seqs=64",
            "algorithm=reinforce_plus_plus",
            "data.max_prompt_length=160",
            "actor.microbatch_tokens=1024",
            "trainer.total_training_steps=1",
            "trainer.test_freq=0",
            "trainer.val_before_train=false",
        ]
        with nothing_left(), _store_watched() as seen:
            assert main(picture_runs.words(task, tmp_path / f"run{samples}", *more)) == 0
        most[samples] = max(seen)
    assert most[1] > PROMPTS * PICTURE_BYTES, "all pictures of the step at once"
    assert most[8] - most[1] < 3 * PROMPTS * PICTURE_BYTES, most


@contextmanager
def _store_watched() -> Iterator[list[int]]:
    """What Ray's store holds, in bytes, every twentieth of a second."""
    seen, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.05):
            if ray.is_initialized():
                with suppress(Exception):  # it begins or ends
                    reply = get_memory_info_reply(ray._private.state.state)  # type: ignore[no-untyped-call]
                    seen.append(reply.store_stats.object_store_bytes_used)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()
