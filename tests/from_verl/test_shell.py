"""bash gives verl what it gives it outside of the cage; and no script does harm, whatever it tries."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

from mcore_rl.from_verl import shell
from mcore_rl.from_verl.shell import Expanded, NoCageError, expand, words_of
from mcore_rl.from_verl.written import launch_of

ENVIRONMENT = {"HOME": "/users/me", "NNODES": "4", "EMPTY": ""}
SCRIPTS = {
    "a plain command": "set -x\nexport A=1 # note\npython3 -m verl.main a=1 \\\n  b='x y' \\\n  c=\"$HOME/z\"",
    "defaults": "N=${NNODES:-2} M=${M:-3} K=${K-} E=${EMPTY:-e} F=${EMPTY-f}\n"
    'P=${NO:+set} Q=${NNODES:+_$NNODES}\npython3 -m verl.main n=$N m=${M} "k=$K" e=$E "f=$F" p=$P q=x$Q r=${NO:-${N}}',
    "arithmetic": "a=$((1024 * 2)); b=$(((a + 3) / 2))\npython3 -m verl.main a=$a b=${b} c=$((a - b)) d=$(($a % 7))",
    "arrays": "A=(\n  x=1  # one\n  y=\"['$HOME/a', 'b']\"\n)\nA+=(z='a b')\nNONE=()\n"
    'python3 -m verl.main "${A[@]}" "${NONE[@]}" w=2 "$@"',
    "loops, functions and cases": "set -euo pipefail\nf() {\n"
    "case $1 in 2) echo two ;; *) echo other ;; esac\n}\n"
    'for n in 1 2; do X+=$(f $n); done\npython3 -m verl.main x=$X y=${X%other} z=${X^^}',
    "here-documents": "read -r A <<< 'a b'\npython3 -m verl.main a=\"$A\" <<EOF\ntext\nEOF",
    "redirection": "mkdir -p logs; python3 -m verl.main a=1 > logs/none/run.log 2>&1",
    "a pipe": "python3 -m verl.main a=1 b=2 2>&1 | tee -a log.txt",
    "in the background": "nohup python3 -m verl.main a=1 > log 2>&1 &",
    "exec": "exec > log 2>&1\nexec python3 -m verl.main a=1",
    "the shell's own": "ulimit -n 65535\ncd \"$(dirname \"$0\")\"\npython3 -m verl.main a=$(basename /x/y.sh .sh)",
}  # fmt: skip


def by_bash(script: str, folder: Path) -> list[str]:
    """What bash gives to python3, without any cage."""
    stub = folder / "bin" / "python3"
    stub.parent.mkdir()
    stub.write_text('#!/bin/bash\nprintf "%s\\0" "$@" >"$TOLD"\n')
    stub.chmod(0o755)
    told = folder / "told"
    environment = {**ENVIRONMENT, "TOLD": str(told), "PATH": f"{stub.parent}:/usr/bin:/bin"}
    (folder / "logs" / "none").mkdir(parents=True)
    command = ["/bin/bash", "--norc", "-c", f"{script}\nwait"]
    subprocess.run(command, env=environment, cwd=folder, check=False, capture_output=True)
    return told.read_text().split("\0")[:-1]


@pytest.mark.parametrize("name", SCRIPTS)
def test_verl_is_given_what_bash_gives_it(name: str, tmp_path: Path) -> None:
    expanded = expand(SCRIPTS[name], environment=ENVIRONMENT)
    (launch,) = filter(None, map(launch_of, expanded.programs))
    assert ["-m", launch.module, *launch.words] == by_bash(SCRIPTS[name], tmp_path)
    assert expanded.stopped == ""


# What starts verl -> the words after its module.
STARTED = {
    "ray job submit --address http://h:8265 -- python3 -m verl.trainer.main_ppo a=1": ["a=1"],
    "torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer a=1": ["a=1"],
    "for h in x y; do ssh $h \"cd /v && python3 -m verl.trainer.main_ppo a=$h\"; done": ["a=x"],
    "srun -N 2 bash -c 'X=3; python3 -m verl.trainer.main_ppo a=$X'": ["a=3"],
    "/opt/conda/bin/python3 -m verl.trainer.main_ppo a=1": ["a=1"],
    "PATH=/usr/bin:$PATH; env A=1 uv run --extra vllm python3 -m verl.trainer.main_ppo a=1": ["a=1"],
    "python3 verl/trainer/main_ppo.py a=1": ["a=1"],
    "P=(python -u); \"${P[@]}\" -m verl.trainer.main_ppo a=1": ["a=1"],
}  # fmt: skip


@pytest.mark.parametrize("script", STARTED)
def test_whatever_starts_it_verl_is_found(script: str) -> None:
    launches = [launch for each in expand(script, environment={}).programs if (launch := launch_of(each))]
    assert launches and launches[0].words == STARTED[script]


def test_arguments_and_files_beside_a_script(tmp_path: Path) -> None:
    (tmp_path / "env.sh").write_text("SIZE=7\n")
    (tmp_path / "secret.txt").write_text("SIZE=9\n")
    script = tmp_path / "run.sh"
    script.write_text(
        'if [ $# -lt 1 ]; then exit 1; fi\nsource "$(dirname "${BASH_SOURCE[0]}")/env.sh"\n'
        'source "$(dirname "$0")/secret.txt"\npython3 -m verl.trainer.main_ppo a=$SIZE b=$1 "${@:2}"\n'
    )
    programs = expand(script.read_text(), script, ["x", "c=1"], environment={}).programs
    assert programs[-1] == ["python3", "-m", "verl.trainer.main_ppo", "a=7", "b=x", "c=1"]
    assert programs[0] == ["source", f"{tmp_path}/secret.txt"], "a file that is no script is not read"
    assert expand(script.read_text(), script, environment={}).stopped


def test_what_a_program_prints_is_a_mark() -> None:
    words = expand("python3 -m verl.main a=$(nvidia-smi -L | wc -l) b=`hostname`", environment={}).programs[-1]
    assert [bool(shell.OUTPUT.search(word)) for word in words[-2:]] == [True, True]
    assert all(word.isprintable() for word in words)


def test_why_a_script_stopped() -> None:
    assert "MODEL: unbound variable" in expand("set -u\npython3 -m verl.main a=$MODEL", environment={}).stopped
    assert "unexpected EOF" in expand("python3 -m verl.main a='1", environment={}).stopped


HARM = {
    "removes": "rm -rf {folder}; /bin/rm -rf {folder}; command rm -rf {folder}; exec rm -rf {folder}",
    "writes": "echo x > {folder}/new; echo x >> {folder}/kept; : > {folder}/kept; cat <<E > {folder}/new\nx\nE",
    "writes by descriptors": "exec 3<> {folder}/kept; echo x >&3; exec 4> {folder}/new; echo x >&4",
    "is another bash": "/bin/bash -c 'echo x > {folder}/new'; enable -f /lib/x.so x; $BASH -c 'echo x > {folder}/new'",
    "unsets": "unset -f rm; unset command_not_found_handle; PATH=/bin:/usr/bin; rm -rf {folder}; touch {folder}/new",
    "traps": "trap 'rm -rf {folder}' EXIT; trap 'echo x > {folder}/new' DEBUG; true",
}


@pytest.mark.parametrize("name", HARM)
def test_nothing_is_changed(name: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("as it was")
    expand(HARM[name].format(folder=tmp_path), environment={})
    assert [each.name for each in tmp_path.iterdir()] == ["kept"] and kept.read_text() == "as it was"


def test_files_of_the_user_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sesame\n")
    script = (
        f"a=$(<{tmp_path}/key); b=$(cat {tmp_path}/key); read -r c < {tmp_path}/key; mapfile -t d < {tmp_path}/key\n"
        f'source {tmp_path}/key; for f in {tmp_path}/*; do e+=$f; done\npython3 -m verl.main "$a$b$c${{d[*]}}$e"'
    )
    assert "sesame" not in str(expand(script, environment={}).programs)
    assert f"{tmp_path}/key" not in expand(script, environment={}).programs[-1][-1], "nor are folders listed"


def test_no_connection_is_made() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        expand(f"exec 3<>/dev/tcp/127.0.0.1/{server.getsockname()[1]}; echo secret >&3", environment={})
        with pytest.raises(TimeoutError):
            server.accept()


def test_nobody_is_signalled() -> None:
    with subprocess.Popen(["sleep", "60"]) as victim:
        expand(f"kill -9 {victim.pid} {os.getpid()} $PPID; kill -9 -1; builtin kill -9 {victim.pid}", environment={})
        assert victim.poll() is None
        victim.kill()


def processes_of_cages() -> int:
    """Processes of the users that a root becomes; of others there is only the limit."""
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            count += 60000 <= os.stat(f"/proc/{name}").st_uid < 65000
        except OSError:
            continue
    return count


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (":(){ :|:& };:", ""),  # the first of them ends, and all go with it
        (":(){ :|:& };:; sleep 9; while :; do :; done", "did not end"),
        ("while :; do :; done", "did not end"),
        ("f() { f & f; }; f", "did not end"),
        ("trap '' TERM INT HUP; set -m; (while :; do :; done) & disown; wait", ""),
        ("while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx >&2; done", "did not end"),
        ("while :; do python3 xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; done", "MiB|did not end"),
        ("x=aaaaaaaa; while :; do x=$x$x; done", "allocate|did not end"),
    ],
)
def test_it_ends_and_stays_small(script: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "DEADLINE_S", 2)
    monkeypatch.setattr(shell, "MAX_BYTES", 1 << 16)
    most, over, before = [0], threading.Event(), threading.active_count()

    def watch() -> None:
        while not over.wait(0.05):
            most[0] = max(most[0], processes_of_cages())

    watching = threading.Thread(target=watch)
    watching.start()
    begun = time.monotonic()
    try:
        expanded = expand(script, environment={})
    finally:
        over.set()
        watching.join()
    assert re.search(said, expanded.stopped) and time.monotonic() - begun < 60
    assert most[0] <= shell.MAX_PROCESSES + 2 and threading.active_count() == before
    if os.geteuid() == 0:
        assert processes_of_cages() == 0, "nothing is left"


def test_secrets_and_what_changes_bash_do_not_reach_it(tmp_path: Path) -> None:
    environment = {
        "WANDB_API_KEY": "sesame-open", "OTHER": "not-named", "NAMED": "yes", "BASH_ENV": "/x", "PS4": "$(touch /x)",
        "BASH_FUNC_python3%%": "() { echo; }",
    }  # fmt: skip
    script = tmp_path / "run.sh"
    script.write_text('set -x; python3 -m verl.main "$WANDB_API_KEY" "$NAMED" "$(declare -p)" "$(set)" PS4 BASH_ENV')
    words = expand(script.read_text(), script, environment=environment).programs[-1]
    assert words[3:5] == ["", "yes"]
    assert not any(each in str(words) for each in ("sesame", "not-named", "touch /x"))


def test_without_a_cage_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bare:
        """A machine whose kernel has no Landlock."""

        def __init__(self, module: str, environment: dict[str, str], *, shows: bool) -> None:
            self.socket, theirs = socket.socketpair()
            reading, writing = os.pipe()
            with theirs:
                theirs.sendall(b"Landlock\0")
            os.close(writing)
            self.output = os.fdopen(reading, "rb")

        def kill(self) -> None:
            pass

        def end(self) -> int:
            return 1

    monkeypatch.setattr(shell, "GuardedProgram", Bare)
    with pytest.raises(NoCageError, match="no cage for it \\(Landlock\\)"):
        expand("python3 -m verl.main a=$X", environment={})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("python3 -m verl.main a=1 \\\n b='x $y' # c", ["python3", "-m", "verl.main", "a=1", "b=x $y"]),
        ("data.a=1 # one\n+b.c='x y'\n", ["data.a=1", "+b.c=x y"]),
        ("python3 -m verl.main a=$X", None),
        ("a=1; b=2", None),
        ("set -x\npython3 -m verl.main", None),
        ("a='1", None),
    ],
)
def test_plain_words_take_no_shell(text: str, words: list[str] | None) -> None:
    assert words_of(text) == words


def test_records_of_processes_that_write_at_once_are_taken_apart() -> None:
    told = "7(\0008(\0007=python3\0008=tee\0007=a=1\n2\0008)\0007)\0009(\0009=cut"
    assert shell._programs(told) == [["tee"], ["python3", "a=1\n2"]]
    assert Expanded([]).stopped == ""
