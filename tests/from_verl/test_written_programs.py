"""A program of verl's is found in whatever starts it, and becomes ours or is refused by name."""

from __future__ import annotations

import pytest

from mcore_rl.cli import COMMANDS
from mcore_rl.from_verl.written import PROGRAMS, Launch, launch_of

FOUND = {  # a command -> (module, our program, mode, words)
    "python3 -m verl.trainer.main_ppo a=1": ("verl.trainer.main_ppo", "train", "sync", ["a=1"]),
    "python -m recipe.dapo.main_dapo a=1": ("recipe.dapo.main_dapo", "train", "sync", ["a=1"]),
    "python -u -m verl.experimental.fully_async_policy.fully_async_main a=1": (
        "verl.experimental.fully_async_policy.fully_async_main", "train", "async", ["a=1"],
    ),
    "python3 -m verl.experimental.one_step_off_policy.main_ppo a=1": (
        "verl.experimental.one_step_off_policy.main_ppo", "train", "one_step_off", ["a=1"],
    ),
    "python -m torch.distributed.run --nnodes 2 -m verl.trainer.fsdp_sft_trainer a=1": (
        "verl.trainer.fsdp_sft_trainer", "sft", "sync", ["a=1"],
    ),
    "python3 verl/trainer/main_generation.py a=1": ("verl.trainer.main_generation", "generate", "sync", ["a=1"]),
    "python3 -m verl.trainer.main_eval a=1": ("verl.trainer.main_eval", "evaluate", "sync", ["a=1"]),
    "python3 -m verl.model_merger merge --backend fsdp": (
        "verl.model_merger", "", "sync", ["merge", "--backend", "fsdp"],
    ),
    "python3 -m verl.trainer.some_other a=1": ("verl.trainer.some_other", "", "sync", ["a=1"]),
}  # fmt: skip


@pytest.mark.parametrize("command", FOUND)
def test_a_program_of_verls(command: str) -> None:
    launch = launch_of(command.split())
    assert launch is not None
    assert (launch.module, launch.program, launch.mode, launch.words) == FOUND[command]


@pytest.mark.parametrize("command", ["python3 main.py a=1", "pip install verl", "python3 -m pytest verl", "ls verl"])
def test_what_is_none(command: str) -> None:
    assert launch_of(command.split()) is None


def test_torchrun_says_how_many_devices() -> None:
    words = [
        "torchrun",
        "--nnodes=2",
        "--nproc-per-node",
        "4",
        "--node_rank=$R",
        "-m",
        "verl.trainer.sft_trainer",
        "a=1",
    ]
    launch = launch_of(words)
    assert launch is not None and (launch.nodes, launch.devices) == ("2", "4")
    assert launch_of(["torchrun", "--nproc_per_node=gpu", "-m", "verl.trainer.sft_trainer"]) == Launch(
        "verl.trainer.sft_trainer"
    )


def test_every_program_becomes_a_command_and_others_are_told_what_to_do() -> None:
    assert {*PROGRAMS.values()} <= {*COMMANDS}
    assert "mcore-rl convert" in Launch("verl.model_merger").remedy
    assert "main_ppo, " in Launch("verl.trainer.some_other").remedy
