"""Every algorithm is found, without torch, and its functions are there; a file of one's own is as good as ours."""

from __future__ import annotations

import pickle
import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest
import torch

from mcore_rl.algorithms.advantages.estimation import estimate_advantages
from mcore_rl.algorithms.policy import ActorLoss
from mcore_rl.config import algorithms as folder
from mcore_rl.config.algorithm_object import ACTOR, CRITIC, REFERENCE, InLoss, InReward, Scope
from mcore_rl.config.algorithm_registry import algorithms, estimator, estimators, policy_loss, policy_losses
from mcore_rl.config.compose import as_yaml, compose
from mcore_rl.config.run import RunConfig, run_violations
from mcore_rl.ground.errors import ConfigError, refuse_if_any
from tests.algorithms.cases import ALL
from tests.algorithms.loss_cases import drawn, whole
from tests.support import vapo, verifier
from tests.support.own_algorithm import LOSS, MEDIAN
from tests.support.settings import actor_config, algorithm_config

FILES = sorted(path.stem for path in Path(folder.__path__[0]).glob("[!_]*.py"))


def test_every_file_is_an_algorithm() -> None:
    assert list(algorithms()) == FILES and len(FILES) >= 12
    assert len({each.title for each in algorithms().values()}) == len(FILES)
    assert all(each.paper.startswith("arXiv:") and each.about for each in algorithms().values())


def test_no_two_parts_share_a_name() -> None:
    for parts, table in (
        ([each.advantages for each in algorithms().values()], estimators()),
        ([each.loss for each in algorithms().values()], policy_losses()),
    ):
        assert all(table[part.name] is part for part in parts)


def test_every_part_names_a_function_of_its_kind() -> None:
    for row in estimators().values():
        first, *rest = signature(row.load()).parameters.values()
        kinds = {"sequence": "PromptGroups", "token": "AdvantageInputs", "pair": "Sequence[float]"}
        assert first.annotation == kinds[row.scope.name] and len(rest) == (row.scope.name != "pair")
    for loss in policy_losses().values():
        first, _ = signature(loss.load()).parameters.values()
        assert first.annotation == "LossInputs"
    for part in (*estimators().values(), *policy_losses().values()):
        assert part.load().__name__ == part.name and part.formula and part.paper


def test_roles_follow_from_the_parts() -> None:
    roles = {name: each.roles for name, each in algorithms().items()}
    assert roles["ppo"] == (ACTOR, CRITIC) and roles["rloo"] == roles["grpo"] == (ACTOR, REFERENCE)
    assert roles["dapo"] == (ACTOR,)
    assert isinstance(algorithms()["rloo"].kl, InReward) and isinstance(algorithms()["grpo"].kl, InLoss)


def test_a_run_is_composed_and_checked_before_torch_is_loaded() -> None:
    code = (
        "import sys; from mcore_rl import cli; from mcore_rl.config.compose import compose\n"
        "from mcore_rl.config.run import RunConfig, run_violations\n"
        "cli.parser('train', cli.command('train')).format_help()\n"
        "run_violations(compose(RunConfig, 'train', ['algorithm=rloo', 'actor.ppo_epochs=2']))\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


VERIFIER_IN_LUNCH = Path(verifier.__file__).read_text().replace('name="verifier",', 'name="verifier", phase="lunch",')


def test_a_name_that_is_not_there_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"algorithm.adv_estimator=rlo: there is none of that name. Did you mean rloo"
    ):
        estimator("rlo")
    with pytest.raises(
        ConfigError, match=r"Choose one of cispo, clip_cov, .*, ppo_clip, preference, sapo, sppo, or write FILE"
    ):
        policy_loss("zebra")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1", "defines no Algorithm"),
        ("from mcore_rl.config.algorithms.grpo import GRPO", "defines no Algorithm"),
        ("raise SystemExit(3)", "running it raised SystemExit: 3"),
        ("import no_such_module", "running it raised ModuleNotFoundError: No module named 'no_such_module'"),
        (
            "import copy\nfrom mcore_rl.config.algorithms.grpo import GRPO\nX = copy.copy(GRPO)",
            "calls an algorithm grpo, as one of ours is",
        ),
        (VERIFIER_IN_LUNCH, "names the phase of its role verifier: lunch"),
        (MEDIAN, "no algorithm of the file has a part called meridian. Did you mean median?"),
    ],
)
def test_what_is_wrong_in_a_file_is_said_in_a_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        estimator(f"{path}:meridian")
    assert len(error.value.violations) == 1
    assert str(error.value.violations[0]).startswith(f"algorithm.adv_estimator={path}:meridian: {said}")


def test_a_file_is_found_from_its_name_alone(tmp_path: Path) -> None:
    """As in a worker on another node: only the configuration travels."""
    path = tmp_path / "own.py"
    path.write_text(MEDIAN + LOSS)
    case = ALL["drawn_0"]
    config = algorithm_config(adv_estimator=f"{path}:median")
    assert estimator(config.adv_estimator).scope is Scope.sequence
    here = estimate_advantages(case.inputs(), case.group_S, config).advantages_T
    batch = whole(drawn(0))
    loss, plain = (ActorLoss(actor_config(loss_mode=mode)) for mode in (f"{path}:median", "gpg"))
    assert float(loss(batch).total.detach()) == pytest.approx(3 * float(plain(batch).total.detach()))

    sent, back = tmp_path / "sent", tmp_path / "back"
    sent.write_bytes(pickle.dumps((config, case.inputs(), case.group_S, loss)))
    code = (
        "import pickle, sys, torch\n"
        "from types import SimpleNamespace\n"
        "from mcore_rl.algorithms.advantages.estimation import estimate_advantages\n"
        "from mcore_rl.config.algorithm_registry import policy_loss\n"
        "config, inputs, group_S, loss = pickle.load(open(sys.argv[1], 'rb'))\n"
        "found = estimate_advantages(inputs, group_S, config).advantages_T\n"
        "rows = SimpleNamespace(advantages_N=torch.ones(2), logprobs_N=torch.ones(2))\n"
        "torch.save((found, policy_loss(loss.config.loss_mode).load()(rows, loss.config).loss_N), sys.argv[2])"
    )
    subprocess.run([sys.executable, "-c", code, str(sent), str(back)], check=True, cwd=tmp_path)
    there, loss_N = torch.load(back)
    assert torch.equal(there, here) and bool(here.any())
    assert loss_N.tolist() == [-3.0, -3.0]


def test_keys_of_a_file_are_typed_bounded_and_travel_with_the_run(tmp_path: Path) -> None:
    path = tmp_path / "my.vapo.py"
    path.write_text(Path(vapo.__file__).read_text())
    run = compose(RunConfig, "train", [f"algorithm={path}", "algorithm.alpha=0.2"])
    assert vars(run.algorithm)["alpha"] == 0.2 and vars(run.actor)["imitation_coef"] == 0.1
    (sent := tmp_path / "sent").write_bytes(pickle.dumps(run))
    code = "import pickle, sys; run = pickle.load(open(sys.argv[1], 'rb')); print(run.algorithm.alpha, run.actor)"
    told = subprocess.run(
        [sys.executable, "-c", code, str(sent)], check=True, cwd=tmp_path, capture_output=True, text=True
    )
    assert told.stdout.startswith("0.2 ImitatingConfig(")
    (tmp_path / "kept.yaml").write_text(as_yaml(run))
    assert compose(RunConfig, "train", [], tmp_path, "kept") == run

    def refused(*overrides: str) -> str:
        with pytest.raises(ConfigError) as error:
            refuse_if_any(run_violations(compose(RunConfig, "train", overrides), planned=True))
        return str(error.value)

    assert "algorithm.alpha=-1.0: must be positive" in refused(f"algorithm={path}", "algorithm.alpha=-1")
    assert "algorithm.alhpa=1" in (said := refused(f"algorithm={path}", "algorithm.alhpa=1"))
    assert "Did you mean algorithm.alpha" in said
    assert "algorithm.lam=0.5: is not read" in refused(f"algorithm={path}", "algorithm.lam=0.5")
    assert "algorithm.alpha=1" in refused("algorithm=grpo", "algorithm.alpha=1"), "no file, no key"


def test_the_median_of_a_group_is_its_baseline(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(MEDIAN)
    case = ALL["drawn_0"]
    advantages = estimate_advantages(case.inputs(), case.group_S, algorithm_config(adv_estimator=f"{path}:median"))
    scores = [sum(row) for row in case.trained(case.rewards)]
    expected = []
    for own, group, row in zip(scores, case.groups, case.trained(case.rewards), strict=True):
        members = [
            s for s, g, r in zip(scores, case.groups, case.trained(case.rewards), strict=True) if g == group and r
        ]
        value = own - float(torch.tensor(members, dtype=torch.float64).quantile(0.5)) if len(members) > 1 else 0.0
        expected.append([value] * len(row))
    assert advantages.advantages_T.tolist() == pytest.approx(case.at_tokens(expected))
