"""What is read out of a script is what bash gives to verl; what only a run would tell is said to be unknown."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from mcore_rl.config.verl.shell import UNKNOWN, arguments
from mcore_rl.config.verl.shell_words import UnclosedError

ENVIRONMENT = {"HOME": "/users/me", "NNODES": "4", "EMPTY": ""}
LAUNCH = 'python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer "$@"'
SCRIPTS = {
    "a plain command": "set -x\nexport A=1 # note\npython3 -m verl.main a=1 \\\n  b='x y' \\\n  c=\"$HOME/z\"",
    "defaults": "N=${NNODES:-2} M=${M:-3} K=${K-} E=${EMPTY:-e} F=${EMPTY-f}\n"
    'P=${NO:+set} Q=${NNODES:+_$NNODES}\npython3 -m verl.main n=$N m=${M} "k=$K" e=$E "f=$F" p=$P q=x$Q r=${NO:-${N}}',
    "arithmetic": "a=$((1024 * 2)); b=$(((a + 3) / 2))\npython3 -m verl.main a=$a b=${b} c=$((a - b)) d=$(($a % 7))",
    "arrays": "A=(\n  x=1  # one\n  y=\"['$HOME/a', 'b']\"\n)\nA+=(z='a b')\nNONE=()\n"
    'python3 -m verl.main "${A[@]}" "${NONE[@]}" w=2 "$@"',
    "conditions": 'x=2\nif [ "$x" -gt 1 ] && [ -n "$NNODES" ]; then y=big; '
    'elif [ -z "$x" ]; then y=none; else y=small; fi\n'
    '[ "$y" = big ] && z=1 || z=2\n[[ "$y" != big ]] && w=1 || w=2\npython3 -m verl.main y=$y z=$z w=$w',
    "words are cut at spaces": "MORE='a=1 b=2'\npython3 -m verl.main $MORE \"$MORE\" 'c=$MORE'",
    "quotes": 'python3 -m verl.main a="x\\"y" b=\'["c","d"]\' c=e\\ f d="\\$x" e=a\'b\'"c"',
    "redirection": "python3 -m verl.main a=1 2>&1 | tee log.txt",
    "after other commands": f"cd /\nset -e; {LAUNCH.replace('--config-name=ppo_megatron_trainer', 'a=1')}",
}


def by_bash(script: str, folder: Path) -> list[str]:
    stub = 'python3() { printf "%s\\0" "$@" >"$TOLD"; exit; }\n'
    told = folder / "told"
    command = ["/bin/bash", "--norc", "-c", stub + script]
    subprocess.run(command, env={**ENVIRONMENT, "TOLD": str(told)}, cwd="/", check=False, capture_output=True)
    words = told.read_text().split("\0")[:-1]
    return words[[word.startswith("verl.") for word in words].index(True) + 1 :]


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_is_read_as_bash_reads_it(name: str, tmp_path: Path) -> None:
    module, words = arguments(SCRIPTS[name], ENVIRONMENT)
    assert module.startswith("verl.")
    assert words == by_bash(SCRIPTS[name], tmp_path) and words


def test_what_only_a_run_would_tell_is_unknown() -> None:
    script = """
when=$(date)
if [ -d /data ]; then root=/data; else root=/other; fi
for n in 1 2; do last=$n; done
case $x in a) mode=1 ;; esac
python3 -m verl.main a=$when b=$root c=$last d=$mode e=`hostname` f=${x%.sh} g=1
"""
    words = arguments(script, {})[1]
    assert [word for word in words if UNKNOWN not in word] == ["g=1"] and len(words) == 7


def test_nothing_is_run(tmp_path: Path) -> None:
    arguments(f"touch {tmp_path}/ran; $(touch {tmp_path}/ran); f() {{ touch {tmp_path}/ran; }}; f", {})
    assert not any(tmp_path.iterdir())


def test_words_alone() -> None:
    assert arguments("data.a=1 # one\n+b.c='x y'\n", {}) == ("", ["data.a=1", "+b.c=x y"])


@pytest.mark.parametrize("script", ["a='x", 'a="x', "A=(x", "a=${x", "a=$((1"])
def test_what_is_never_closed(script: str) -> None:
    with pytest.raises(UnclosedError):
        arguments(script, {})
