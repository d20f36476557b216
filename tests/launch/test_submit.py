"""submit.py: what it refuses before anything is queued, and the script that it writes."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.cli import main
from mcore_rl.config.launch import load_recipe
from mcore_rl.ground.errors import ConfigError
from mcore_rl.runtime.slurm_job import Job, read_job, render

ROOT = Path(__file__).parents[2]
FACTS = ROOT / "model_configs" / "hf_configs.json"
PLAIN = ["recipe=arithmetic_grpo", "cluster=cpu"]


def job(tmp_path: Path, *more: str) -> Job:
    return read_job([*PLAIN, f"trainer.default_local_dir={tmp_path}/run", *more], tmp_path)


def refusal(tmp_path: Path, *texts: str) -> str:
    with pytest.raises(ConfigError) as error:
        read_job(texts, tmp_path)
    return str(error.value)


def command_of(script: str) -> list[str]:
    """What the script runs, without the shell's line breaks."""
    (line,) = [each for each in script.replace("\\\n", "").splitlines() if "mcore_rl.cli train" in each]
    return line.split()


def options_of(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]


def test_the_script_asks_for_the_cluster_s_nodes_and_runs_the_recipe(tmp_path: Path) -> None:
    script = render(
        job(tmp_path, "nodes=2", "trainer.n_gpus_per_node=1", "rollout.n=4", "cluster.slurm.partition=main")
    )
    options = options_of(script)
    assert {"--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2", "--partition=main", "--requeue"} <= set(options)
    assert "--signal=B:USR1@300" in options and f"--output={tmp_path}/run/logs/slurm/%j.log" in options
    assert not any(option.startswith(("--gres", "--exclusive", "--mem")) for option in options), "there are only cores"
    command = command_of(script)
    assert command[:5] == ['"${on_head[@]}"', '"${container[@]}"', '"$python"', "-m", "mcore_rl.cli"]
    assert command[5:10] == ["train", "--config-dir", f"{ROOT}/launch/recipes", "--config-name", "arithmetic_grpo"]
    said = {"rollout.n=4", "trainer.nnodes=2", "trainer.resume_mode=auto", f"trainer.default_local_dir={tmp_path}/run"}
    assert said <= set(command)
    assert f"export python={sys.executable}" in script


def test_devices_are_asked_for_and_ray_is_told_how_many(tmp_path: Path) -> None:
    cluster = ["cluster=nvidia_h100", "cluster.slurm.account=rl", "cluster.slurm.extra=[--constraint=ib]"]
    texts = [
        "recipe=arithmetic_grpo",
        *cluster,
        f"trainer.default_local_dir={tmp_path}/run",
        "cluster.environment.A=b c",
    ]
    script = render(read_job([*texts, "cluster.slurm.setup=[module load gcc,ulimit -l unlimited]"], tmp_path))
    expected = {"--gres=gpu:8", "--exclusive", "--mem=0", "--cpus-per-task=96", "--account=rl", "--constraint=ib"}
    assert expected <= set(options_of(script))
    assert "gpus_per_node=8\n" in script and '--num-gpus="$gpus_per_node"' in script
    assert '--num-cpus="$SLURM_CPUS_ON_NODE"' in script, "never unset: Ray would count what the machine has"
    assert "export A='b c'" in script
    assert "module load gcc\nulimit -l unlimited\n" in script


def test_engines_on_nodes_of_their_own_are_counted(tmp_path: Path) -> None:
    apart = ["cluster=nvidia_h100", "trainer.placement=separate", "rollout.dp=17", "nodes=3"]
    read = read_job(["recipe=arithmetic_grpo", *apart, f"trainer.default_local_dir={tmp_path}/run"], tmp_path)
    assert read.num_nodes == 3 + 3, "17 engines of one device stand on three nodes of eight"


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ("pyxis", ["srun_options=(--container-image=img.sqsh --container-mounts=/tmp:/tmp,", "/data:/d"]),
        ("apptainer", ["container=(apptainer exec --rocm --bind /tmp:/tmp --bind ", "--bind /data:/d --pwd "]),
    ],
)
def test_programs_are_brought_into_a_container(tmp_path: Path, engine: str, expected: list[str]) -> None:
    container = [f"cluster.container.engine={engine}", "cluster.container.image=img.sqsh"]
    texts = ["recipe=arithmetic_grpo", "cluster=amd_mi300x", "cluster.container.mounts=['/data:/d']", *container]
    script = render(read_job([*texts, f"trainer.default_local_dir={tmp_path}/run"], tmp_path))
    for part in expected:
        assert part in script
    assert "export python=python3\n" in script, "the container's own"


def test_the_doctor_is_a_step_where_the_cluster_asks_for_it(tmp_path: Path) -> None:
    assert "doctor=none #" in render(job(tmp_path))
    script = render(job(tmp_path, "cluster.slurm.doctor=quick"))
    assert "doctor=quick #" in script
    assert f"-m mcore_rl.cli doctor --cluster {tmp_path}/run/logs/slurm/cluster.yaml " in script
    assert "Write none, nodes, quick, full or only" in refusal(tmp_path, *PLAIN, "cluster.slurm.doctor=fast")


def test_the_model_is_staged_where_the_cluster_asks_for_it(tmp_path: Path) -> None:
    plain = render(job(tmp_path, "model.path=models/m"))
    assert f"export model={tmp_path}/models/m stage_under='' #" in plain and 'keep_staged=""\n' in plain
    script = render(job(tmp_path, "cluster.slurm.stage_model=$TMPDIR", "cluster.slurm.keep_staged=true"))
    assert " stage_under='$TMPDIR' #" in script and "keep_staged=yes\n" in script, "each node's own"
    contained = ["cluster.container.engine=pyxis", "cluster.container.image=img.sqsh"]
    script = render(job(tmp_path, "cluster.slurm.stage_model=/nvme/rl", *contained))
    assert ",/nvme/rl:/nvme/rl" in script, "a container must see it"
    said = refusal(tmp_path, *PLAIN, "cluster.slurm.stage_model=$TMPDIR", *contained)
    assert "slurm.stage_model=$TMPDIR: has a variable, and a container needs to know the folder" in said
    said = refusal(tmp_path, *PLAIN, "cluster.slurm.stage_model=nvme")
    assert "slurm.stage_model=nvme: is no absolute path. Write a folder of every node's own disks" in said
    assert "slurm.keep_staged=True: nothing is staged" in refusal(tmp_path, *PLAIN, "cluster.slurm.keep_staged=true")
    said = refusal(tmp_path, *PLAIN, "cluster.slurm.stage_model=/nvme", "model.ignore_fields=[use_cache]")
    assert "cluster.slurm.stage_model=/nvme: is for a model that is read as it is" in said


def test_every_script_is_sound_bash(tmp_path: Path) -> None:
    awkward = ["custom_reward_function.path='a $b.py'", "cluster.slurm.requeue=false", "cluster.slurm.qos=high"]
    staged = ["cluster.slurm.stage_model='/my disks/rl'", "cluster.slurm.doctor=nodes"]
    for more in (["cluster.slurm.doctor=full"], [], staged, awkward):
        path = tmp_path / "script"
        path.write_text(render(job(tmp_path, *more)))
        subprocess.run(["bash", "-n", str(path)], check=True)
        if shutil.which("shellcheck"):  # not its notes: those grow with every version
            subprocess.run(["shellcheck", "--norc", "--severity=warning", "--shell=bash", str(path)], check=True)
    assert shlex.quote(awkward[0]) in path.read_text()
    assert "--no-requeue" in options_of(path.read_text()) and "max_requeues=0\n" in path.read_text()


def test_a_run_directory_may_have_spaces(tmp_path: Path) -> None:
    spaced = job(tmp_path, f"trainer.default_local_dir='{tmp_path}/my runs'")
    again = load_recipe("arithmetic_grpo", spaced.overrides)
    assert again.trainer.default_local_dir == f"{tmp_path}/my runs" == str(spaced.run_directory)
    assert f"--output='{tmp_path}/my runs/logs/slurm/%j.log'" in options_of(render(spaced))


def test_everything_wrong_is_told_at_once(tmp_path: Path) -> None:
    said = refusal(tmp_path, "nodes=2", "--what", "nonsense")
    assert "recipe=: is not given. Write recipe=arithmetic_grpo, say" in said and "cluster=: is not given" in said
    assert "nonsense=: is no override. Write key=value" in said
    assert "Did you mean arithmetic_grpo" in refusal(tmp_path, "recipe=arithmetic_grp", "cluster=cpu")
    assert "cluster=cpx: there is no cpx.yaml" in refusal(tmp_path, "recipe=arithmetic_grpo", "cluster=cpx")
    said = refusal(tmp_path, *PLAIN, "rollout.temperature=0", "data.train_batch_size=24")
    assert "rollout.temperature=0" in said and "actor.ppo_mini_batch_size=16: does not divide" in said
    said = refusal(tmp_path, *PLAIN, "trainer.resume_mode='off'")
    assert "trainer.resume_mode=off: a job that is queued again would begin anew" in said
    assert job(tmp_path, "trainer.resume_mode='off'", "cluster.slurm.requeue=false").num_nodes == 1


def test_a_recipe_that_does_not_fit_is_refused_with_the_numbers(tmp_path: Path) -> None:
    large = ["recipe=qwen25_72b_grpo", "cluster=nvidia_h100", "model.path=m", "actor.microbatch_tokens=4000000"]
    assert " of 79.6 GiB (device): " in refusal(tmp_path, *large)


def test_a_dry_run_prints_the_script_and_touches_neither_slurm_nor_the_disk_nor_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from mcore_rl import cli; code = cli.main(['submit', *sys.argv[1:]]);"
        "assert not {'torch', 'megatron', 'ray', 'transformers'} & set(sys.modules); sys.exit(code)"
    )
    asked = [*PLAIN, "--dry-run", f"trainer.default_local_dir={tmp_path}/run", "nodes=2"]
    command = [sys.executable, "-c", code, *asked]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={"PATH": ""}, check=True)
    assert done.stdout.startswith("#!/usr/bin/env bash") and "#SBATCH --nodes=2\n" in done.stdout
    assert not (tmp_path / "run").exists()


def things(directory: Path, model: str = "tiny-mixtral") -> list[str]:
    """Overrides that name a model, without weights, and data, without rows."""
    (directory / "model").mkdir()
    (directory / "model" / "config.json").write_text(json.dumps(json.loads(FACTS.read_text())[model]))
    for name in ("train", "val"):
        (directory / f"{name}.parquet").touch()
    return ["model.path=model", "data.train_files=[train.parquet]", "data.val_files=[val.parquet]"]


def test_what_the_job_would_miss_is_refused_and_a_dry_run_warns_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    asked = [*PLAIN, "trainer.default_local_dir=run", "custom_reward_function.path=mine.py"]
    missing = [
        "model.path=runs/arithmetic/sft/hf/final: there is no such directory",
        "data.train_files[0]=runs/arithmetic/data/train.parquet: there is no such file",
        "custom_reward_function.path=mine.py: there is no such file",
    ]
    assert main(["submit", *asked]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: 4 problems") and all(each in said.err for each in missing) and not said.out
    assert main(["submit", *asked, "--dry-run"]) == 0
    said = capsys.readouterr()
    assert all(f"warning: {each}" in said.err for each in missing) and said.out.startswith("#!/usr/bin/env bash")
    assert "warning: the run is not planned: model.path=runs/arithmetic/sft/hf/final has no config.json" in said.err
    contained = ["cluster.container.engine=pyxis", "cluster.container.image=img.sqsh"]
    assert main(["submit", *asked, "--dry-run", *contained]) == 0
    assert "there is no such" not in capsys.readouterr().err, "paths of a container are its own"
    assert main(["submit", *PLAIN, "--dry-run", "trainer.default_local_dir=run", *things(tmp_path)]) == 0
    assert capsys.readouterr().err == ""


def test_a_run_without_a_published_checkpoint_is_planned_by_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    there = things(tmp_path)
    assert read_job([*PLAIN, *there], tmp_path).num_nodes == 1
    assert " of 0.5 GiB (" in refusal(tmp_path, *PLAIN, *there, "cluster.host_memory_gib=0.5")


def test_without_slurm_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["submit", *PLAIN, f"trainer.default_local_dir={tmp_path}/run", *things(tmp_path)]) == 2
    assert "sbatch=: there is no such program here. Submit from a node" in capsys.readouterr().err
