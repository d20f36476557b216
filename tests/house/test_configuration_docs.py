"""docs/configuration.md has every key of every command: its values, default, meaning and readers."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache

import pytest

from mcore_rl.commands.programs import PROGRAMS
from mcore_rl.config.algorithm_object import Estimator
from mcore_rl.config.algorithm_registry import estimators
from mcore_rl.config.algorithms.ppo import GaeConfig
from mcore_rl.config.bounds import PositiveInt, settings
from mcore_rl.config.typed import defaults
from tools import configuration as tool


@cache
def text() -> str:
    return tool.PAGE.read_text(encoding="utf-8")


def rows(section: str = "") -> list[list[str]]:
    """The cells of the table rows of the page, or of one section."""
    part = text() if not section else text().partition(f"\n## `{section}`\n")[2].partition("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("| ") and not line.startswith("| key ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def row(key: str, command: str) -> list[str]:
    section = key.rpartition(".")[0]
    (cells,) = (
        each for each in rows(section) if f"`{key}`" in each[0] and command in re.split(r", |<br>", each[4])
    )  # fmt: skip
    return cells


def test_the_page_is_up_to_date() -> None:
    assert tool.page() == text(), "run: python tools/configuration.py"


@pytest.mark.parametrize("command", list(tool.COMMANDS))
def test_every_key_of_a_command_is_in_the_section_of_its_group(command: str) -> None:
    prefix = "cluster." if command == "cluster" else ""
    for each in settings(tool.COMMANDS[command]):
        if any(f"{each.key}.".startswith(f"{one}.") for one in tool.REFUSED.get(command, ())):
            continue
        cells = row(f"{prefix}{each.key}", command)
        assert len(cells) == 5 and cells[1] and cells[3], cells


WRITTEN = {  # a value of each key that a command refuses: sound in itself, and not its default
    "trainer.critic_warmup": "2", "trainer.mode": "async", "trainer.record_rollouts": "true", "trainer.replay": "run",
    "data.step_labels_key": "steps", "data.end_of_turn": "x", "rollout.partial": "true",
    "actor.microbatch_patches": "1024", "actor.share_prompts": "auto",
    "rollout.over_sampling": "0.25",
    "rollout.val_kwargs": "{n: 2}", "rollout.return_routed_experts": "true", "reward.judge.path": "judge",
}  # fmt: skip


@pytest.mark.parametrize(("command", "key"), [(name, key) for name, keys in tool.REFUSED.items() for key in keys])
def test_a_key_is_not_listed_for_a_command_that_refuses_it(command: str, key: str) -> None:
    value, program = WRITTEN[key], PROGRAMS[command]
    override = f"{key}.n=2" if value.startswith("{") else f"{key}={value}"
    config = program.composed([override])
    assert any(f"{each.key}.".startswith(f"{key}.") for each in program.violations(config))
    for cells in rows():
        if f"`{key}" in cells[0]:
            assert command not in re.split(r", |<br>", cells[4])


def test_every_key_has_one_anchor_and_every_section_is_in_the_list() -> None:
    anchors = re.findall(r'<a id="([^"]+)">', text())
    assert len(anchors) == len(set(anchors)) == len({each[0].rpartition(">")[2] for each in rows()})
    assert re.findall(r"^## `?([^`\n]+)", text(), re.MULTILINE) == re.findall(
        r"\[`?([^`\]]+)`?\]\(#", text().partition("Groups: ")[2].partition("\n")[0]
    )


def test_a_default_is_what_the_command_takes() -> None:
    """By hand, from conf/*.yaml and the algorithm objects."""
    assert row("actor.optim.lr", "train")[2] == "`1e-06`" and row("actor.optim.lr", "sft")[2] == "`1e-05`"
    assert row("critic.microbatch_tokens", "train")[2] == "`16384`"
    assert row("rollout.max_prompt_length", "train")[2] == "`${data.max_prompt_length}`"
    assert row("rollout.n", "train")[2] == "`5`, by algorithm" and row("rollout.n", "generate")[2] == "`1`"
    assert row("data.train_files", "train")[2] == "`[]`" and row("out", "generate")[2] == ""
    assert row("actor.optim.betas", "train")[2] == "`[0.9,0.999]`"


def test_a_row_in_full() -> None:
    assert row("actor.loss_agg_constant", "train")[1:] == [
        "number in (0, inf), or `null`",
        "`null`",
        "the divisor of `sum_over_constant`; `null` is `data.max_response_length`.",
        "train<br>`dr_grpo`; the others but `gmpo`, `gspo`, `online_dpo`, `spin`, `sppo`, `sppo_softmean` with "
        "`actor.loss_agg_mode=sum_over_constant`",
    ]


@dataclass(kw_only=True)
class Other:
    """Some other settings.

    new: something new.
    """

    new: PositiveInt | None = 3


def test_a_changed_bound_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "COMMANDS", {"sft": Other})
    monkeypatch.setattr(tool, "composed", lambda command: defaults(Other))
    assert '| <a id="new"></a>`new` | whole number in [1, inf), or `null` | `3` | something new. | sft |' in tool.page()


def test_a_changed_reader_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    key = "algorithm.lam"
    parts: dict[str, Estimator] = {name: replace(each, settings=GaeConfig) for name, each in estimators().items()}
    monkeypatch.setattr("mcore_rl.config.unread_keys.estimator", parts.__getitem__)
    assert tool.readers_text(key) == "", "all read it now"
