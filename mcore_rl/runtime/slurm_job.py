"""A run as a Slurm job: checks it, writes one sbatch script out of ``launch/slurm/train.sbatch``, and submits that.

Before anything is queued: the recipe composes, is valid, fits on the cluster, and Slurm takes the script.  Imports
neither torch nor Ray: people type it and wait.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.config.bounds import file_violations
from mcore_rl.config.cluster import ClusterConfig, Container
from mcore_rl.config.engine import Device
from mcore_rl.config.files import output_problem
from mcore_rl.config.hub_files import config_folder, fetched_config
from mcore_rl.config.launch import (
    cluster_yaml,
    load_cluster,
    load_recipe,
    planned_violations,
    program_of,
    read_words,
    recipe_path,
)
from mcore_rl.config.offline import OfflineConfig
from mcore_rl.config.resources import SBATCH
from mcore_rl.config.run import RunConfig, run_violations
from mcore_rl.config.trainer import Placement
from mcore_rl.families.config_json import CONFIG
from mcore_rl.ground.errors import ConfigError, Violation, refuse_if_any
from mcore_rl.planning.plan import plan
from mcore_rl.planning.recipes import other_models, run_model

RESUME = "trainer.resume_mode"
CLUSTER = "cluster.yaml"  # as the job has it, for the doctor


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run and the nodes it is to have.

    recipe: the file.  overrides: of the run, ours included.  run_directory: absolute.  directory: that it starts in.
    """

    recipe: Path
    overrides: tuple[str, ...]
    run: RunConfig | OfflineConfig
    cluster: ClusterConfig
    run_directory: Path
    directory: Path

    @property
    def logs(self) -> Path:
        """Of the job: its script, its cluster, and what it says."""
        return self.run_directory / "logs" / "slurm"

    @property
    def num_nodes(self) -> int:
        """Of the trainer, and of engines that have nodes of their own."""
        trainer = self.run.trainer
        if not isinstance(self.run, RunConfig) or trainer.placement is Placement.colocated:
            return trainer.nnodes
        served = (self.run.rollout, *self.run.scorers.values())
        devices = sum(each.layout.world_size for each in served)
        return trainer.nnodes + -(-devices // max(1, self.cluster.gpus_per_node or trainer.n_gpus_per_node))


def read_job(arguments: Sequence[str], directory: Path) -> Job:
    """The job that ``key=value`` texts ask for, checked.  directory: that relative paths are meant from.

    Raises ConfigError with everything that is wrong: with the texts, the files they name, the run, or its fit.
    """
    named, of_cluster, of_run, wrong = read_words(arguments, "recipe", "cluster", "nodes")
    for key, example in (("recipe", "arithmetic_grpo"), ("cluster", "nvidia_h100")):
        if key not in named:
            wrong.append(Violation(key, "", "is not given", f"Write {key}={example}, say; --help tells more"))
    refuse_if_any(wrong)
    cluster = load_cluster(named["cluster"], of_cluster)
    path = recipe_path(named["recipe"])
    if "nodes" in named:
        of_run.append(f"trainer.nnodes={named['nodes']}")
    of_run += [] if _written(RESUME, of_run) else [f"{RESUME}=auto"]  # a job that is queued again must not begin anew
    run = load_recipe(str(path), of_run)
    run_directory = (directory / run.trainer.default_local_dir).resolve()
    of_run = [each for each in of_run if not each.startswith("trainer.default_local_dir=")]
    plain = re.fullmatch(r"[\w./-]+", str(run_directory))
    of_run.append(f"trainer.default_local_dir={run_directory if plain else repr(str(run_directory))}")  # as hydra reads
    job = Job(
        recipe=path,
        overrides=tuple(of_run),
        run=run,
        cluster=cluster,
        run_directory=run_directory,
        directory=directory.resolve(),
    )
    refuse_if_any(_violations(job))
    return job


def _written(key: str, overrides: Sequence[str]) -> bool:
    return any(each.startswith(f"{key}=") for each in overrides)


def _violations(job: Job) -> list[Violation]:
    """Of the run by itself; where there are none, of the run on its cluster."""
    run = job.run
    cluster = job.cluster
    violations = run_violations(run) if isinstance(run, RunConfig) else run.violations()
    if cluster.slurm.requeue and run.trainer.resume_mode.value != "auto":
        problem = "a job that is queued again would begin anew"
        remedy = "Leave it out, or write cluster.slurm.requeue=false"
        violations.append(Violation(RESUME, run.trainer.resume_mode.value, problem, remedy))
    if cluster.slurm.stage_model and run.model.is_changed:
        problem = (
            "is for a model that is read as it is; with another config.json a view of it is read, in the run directory"
        )
        remedy = "Leave it out, or write the change into a config.json of your own, beside links to the weights"
        violations.append(Violation("cluster.slurm.stage_model", cluster.slurm.stage_model, problem, remedy))
    if unwritable := output_problem(job.run_directory, "directory"):  # of a container too: the script is written here
        violations.append(Violation("trainer.default_local_dir", job.run_directory, *unwritable))
    if violations or not is_known(run):
        return violations
    planned = plan(run, run_model(run), cluster, other_models(run))
    return list(planned.violations)


def is_known(run: RunConfig | OfflineConfig) -> bool:
    """Whether the sizes of its models are: from a config.json, seen from here, or a checkpoint of model_configs/."""
    try:
        other_models(run)
    except ConfigError:
        return False
    return bool(run.recipe.checkpoint) or (config_folder(run.model.path) / CONFIG).is_file()


def absent(job: Job) -> list[Violation]:
    """What the job would miss: a model, data, any other path of its configuration.  Nothing, if it runs in a container.

    Relative paths are looked up from the current directory, in which the job runs too.
    """
    run = job.run
    if job.cluster.container.engine is not Container.none:
        return []
    every = run_violations(run) if isinstance(run, RunConfig) else run.violations()
    planned = planned_violations(run)
    missing = [each for each in every if each not in planned] + file_violations(run)
    if missing or is_known(run):
        return missing
    try:
        fetched_config(run)
    except ConfigError as error:
        return list(error.violations)
    remedy = "Write model.path=DIR, a Hugging Face checkpoint"
    return [Violation("model.path", run.model.path, f"has no {CONFIG}", remedy)]


def render(job: Job) -> str:
    """The sbatch script: ``train.sbatch`` with every ``{{name}}`` filled in."""
    cluster = job.cluster
    slurm = job.cluster.slurm
    program = program_of(job.recipe)
    config = ["--config-dir", str(job.recipe.parent), "--config-name", job.recipe.stem]
    container, srun_options = _container(job)
    values = {
        "job_name": job.recipe.stem,
        "num_nodes": job.num_nodes,
        "cpus_per_node": cluster.cpus_per_node,
        "time_limit": slurm.time_limit,
        "grace_s": slurm.grace_s,
        "directory": shlex.quote(str(job.directory)),
        "output": shlex.quote(f"{job.logs}/%j.log"),
        "options": "\n".join(f"#SBATCH {each}" for each in _options(cluster)),
        "run_directory": shlex.quote(str(job.run_directory)),
        "python": "python3" if cluster.container.engine is not Container.none else shlex.quote(sys.executable),
        "container": shlex.join(container),
        "srun_options": shlex.join(srun_options),
        "interface": slurm.interface,
        "port": slurm.port,
        "gpus_per_node": cluster.gpus_per_node,
        "max_requeues": slurm.max_requeues if slurm.requeue else 0,
        "environment": "\n".join(f"export {name}={shlex.quote(text)}" for name, text in cluster.environment.items()),
        "setup": "\n".join(slurm.setup),
        "device": cluster.device.value,
        "join_timeout_s": slurm.join_timeout_s,
        "doctor": slurm.doctor.value,
        "model": shlex.quote(str(job.directory / job.run.model.path)),
        "stage_under": shlex.quote(slurm.stage_model),
        "keep_staged": "yes" if slurm.keep_staged else '""',
        "cluster": shlex.quote(str(job.logs / CLUSTER)),
        "command": " \\\n    ".join(
            ['"$python" -m mcore_rl.cli ' + shlex.join([program, *config]), *map(shlex.quote, job.overrides)]
        ),
    }
    text = SBATCH.read_text(encoding="utf-8")
    place = re.compile(r"{{(\w+)}}")
    asked = set(place.findall(text))
    assert asked == values.keys(), f"{SBATCH.name} asks for others: {asked ^ values.keys()}"
    return place.sub(lambda name: str(values[name[1]]), text)


def _options(cluster: ClusterConfig) -> list[str]:
    """Of sbatch, besides those that every job has."""
    slurm = cluster.slurm
    named = {"partition": slurm.partition, "account": slurm.account, "qos": slurm.qos}
    options = [f"--{name}={shlex.quote(value)}" for name, value in named.items() if value]
    options.append("--requeue" if slurm.requeue else "--no-requeue")
    if cluster.gpus_per_node:
        options.append(f"--gres=gpu:{cluster.gpus_per_node}")
    if slurm.exclusive:
        options += ["--exclusive", "--mem=0"]
    return [*options, *slurm.extra]


def _container(job: Job) -> tuple[list[str], list[str]]:
    """(prefix of every program, options of srun) that bring it into the container, with what it needs of the node.

    Ray's processes and the run are in containers of their own, and meet in /tmp.
    """
    wanted = job.cluster.container
    places = ["/tmp", str(job.directory), str(job.run_directory), str(job.recipe.parent)]
    places += [staged] if (staged := job.cluster.slurm.stage_model) else []
    mounts = list(dict.fromkeys(mount if ":" in mount else f"{mount}:{mount}" for mount in [*places, *wanted.mounts]))
    if wanted.engine is Container.pyxis:
        inside = f"--container-workdir={job.directory}"
        return [], [f"--container-image={wanted.image}", f"--container-mounts={','.join(mounts)}", inside]
    if wanted.engine is Container.apptainer:
        vendor = "--rocm" if job.cluster.device is Device.rocm else "--nv"
        devices = [vendor] if job.cluster.gpus_per_node else []
        binds = [text for mount in mounts for text in ("--bind", mount)]
        return ["apptainer", "exec", *devices, *binds, "--pwd", str(job.directory), wanted.image], []
    return [], []


def submit(job: Job) -> tuple[str, Path]:
    """(id of the job, its script).  Raises ConfigError where Slurm does not take it; nothing is queued then."""
    script = job.logs / "train.sbatch"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(render(job), encoding="utf-8")
    (job.logs / CLUSTER).write_text(cluster_yaml(job.cluster), encoding="utf-8")
    _sbatch("--test-only", str(script))
    return _sbatch("--parsable", str(script)).partition(";")[0].strip(), script


def _sbatch(*arguments: str) -> str:
    try:
        done = subprocess.run(["sbatch", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        remedy = "Submit from a node that has Slurm's commands; --dry-run needs none"
        raise ConfigError([Violation("sbatch", "", "there is no such program here", remedy)]) from error
    if done.returncode == 0:
        return done.stdout
    said = "; ".join(line.removeprefix("sbatch: error: ") for line in done.stderr.strip().splitlines())
    raise ConfigError([Violation("cluster.slurm", " ".join(arguments[-1:]), f"Slurm refuses it: {said}", _remedy())])


def _remedy() -> str:
    """What there is to choose from."""
    there = subprocess.run(["sinfo", "--noheader", "--format=%R (%D nodes, %l)"], capture_output=True, text=True)
    partitions = ", ".join(dict.fromkeys(line.strip() for line in there.stdout.splitlines())) or "none that is up"
    return f"Change cluster.slurm.partition, time_limit or nodes; the partitions are {partitions}"
