"""Where programs are confined: as root, as a user, in containers; each made for real (``benchmarks/isolation.py``)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.isolation import BEGIN, END, PAGE, SITUATIONS, measured, table
from mcore_rl.rewards.confinement import weaknesses
from tests.support.skips import ANOTHER_USER, KERNEL

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.skipif(os.getuid() != 0, reason=f"{ANOTHER_USER}only root can become somebody else"),
    pytest.mark.skipif(bool(weaknesses()), reason=KERNEL + "; ".join(weaknesses())),
]
CHECK = """
from mcore_rl.config.reward import CodeConfig, RewardConfig
from mcore_rl.ground.errors import ConfigError
from mcore_rl.rewards.scorer import Scorer
with Scorer(RewardConfig(num_workers=1, code=CodeConfig(allow_weak_confinement={allow}))) as scorer:
    try:
        scorer.check_sources(["code"])
    except ConfigError as error:
        print(error)
    else:
        print("graded")
"""


def checked(situation: str, *, allow: bool = False) -> str:
    """What a start says that grades code."""
    command = [sys.executable, "-m", "benchmarks.isolation", "--as", situation, "--", sys.executable, "-c"]
    answer = subprocess.run(
        [*command, CHECK.format(allow=allow)], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    assert "Traceback" not in answer.stderr
    return answer.stdout


@pytest.mark.parametrize(("situation", "call"), [("no-memfd", "memfd_create"), ("no-pidfd", "pidfd_open")])
def test_a_container_without_what_is_needed_is_named(situation: str, call: str) -> None:
    """One message with the remedy, whether weak confinement is allowed or not."""
    for allow in (False, True):
        said = checked(situation, allow=allow)
        assert f"{call} is refused here (EPERM), probably by the seccomp profile of a container" in said
        assert f"Allow {call} in that profile" in said


def test_weak_confinement_is_asked_for_by_name() -> None:
    said = checked("no-landlock")
    assert "Landlock is missing" in said
    assert "reward.code.allow_weak_confinement=true" in said
    assert checked("no-landlock", allow=True) == "graded\n"


@pytest.mark.tier("full")
@pytest.mark.parametrize("situation", ["root", "user", "container", "docker"])
def test_no_attack_succeeds_anywhere(situation: str) -> None:
    result = measured(situation)
    assert not result["refusal"]
    assert len(result["unconfined"]) > 90, "they are attacks"
    assert result["layers"] == ["landlock", "seccomp"]
    assert not any(result["confined"].values()), result["confined"]


def test_the_page_has_every_situation() -> None:
    """Counts are of the machine that wrote it; what is graded, and that nothing succeeded, are not."""
    written = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    rows = [line.strip("| ").split(" | ") for line in written.splitlines() if line.startswith("| ")][1:]
    assert [row[0] for row in rows] == [each.about for each in SITUATIONS.values()]
    assert all(row[3] == "0" if row[4] == "yes" else row[4].startswith("no: ") for row in rows)
    weak = {"refusal": "x", "weak": True}
    assert table({"no-landlock": weak}).splitlines()[-1] in written
