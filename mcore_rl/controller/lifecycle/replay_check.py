"""Whether a run can be replayed with a configuration: what must be as it was, what may differ, and what is recorded.

A replay computes each step again from the same rollouts, so that all that a step depends on must be the same.  What
says where files are, how often they are written, or with what engines drew, may differ; so may the layout, which a note
says: sums are then taken in another order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from mcore_rl.checkpoints.manifest import sum_text
from mcore_rl.controller.lifecycle.messages import note
from mcore_rl.controller.lifecycle.resume_check import RUN, UNIMPORTANT, Identity, flat_settings
from mcore_rl.controller.rollouts.recording import RECORD, record_file
from mcore_rl.ground.errors import CheckpointError, ConfigError, Violation, refuse_if_any
from mcore_rl.tracking.schedule import SCHEDULE, read_schedule

KEY = "trainer.replay"
TAUGHT = "teacher.by_source."  # whose paths may differ, but not the data sources that they are of
# Keys and groups of keys that change no number of a step.
FREE = (
    *("trainer.project_name", "trainer.experiment_name", "trainer.default_local_dir", "trainer.logger", "recipe."),
    *("trainer.save_freq", "trainer.test_freq", "trainer.val_before_train", "trainer.resume_mode", "ray_init."),
    *("trainer.resume_from_path", "trainer.async_save", "trainer.max_to_keep", "trainer.keep_every"),
    *("trainer.log_val_generations", "trainer.save_rollouts", "trainer.record_rollouts", KEY, "trainer.profile_steps"),
    *("trainer.timeout_s", "trainer.device_peak_tflops", "trainer.max_restarts", "trainer.watchdog."),
    *("trainer.push_to_hub", "trainer.prometheus."),
    *("trainer.guards.", "data.mean_response_length", "data.mean_image_tokens"),
    *("trainer.placement", "model.path", "model.tokenizer_path", "model.staged", "data.train_files", "data.val_files"),
    *("data.val_batch_size", "data.val_max_samples", "rollout.val_kwargs.", "rollout.tp", "rollout.dp", "rollout.ep"),
    *("rollout.device", "rollout.dtype", "rollout.gpu_memory_utilization", "rollout.kv_cache_memory_bytes"),
    *("rollout.quantization", "rollout.allow_uncorrected"),
    *("rollout.max_num_seqs", "rollout.max_num_batched_tokens", "rollout.enable_prefix_caching"),
    *("rollout.enforce_eager", "rollout.enable_sleep_mode", "rollout.moe_backend", "reward.num_workers"),
    *("reward.timeout_s", "custom_reward_function.path", "custom_reward_function.import_timeout_s"),
    *("actor.lora.path", "critic.path", "process_reward.path", "reward_model.model.path"),
    *("teacher.path", TAUGHT),
    *("reward.judge.path", "reward.judge.engines."),
)
# Those that change in which order sums are taken, by the end of the key after the role.
LAYOUT_OF_RUN = ("trainer.nnodes", "trainer.n_gpus_per_node", "trainer.device")
LAYOUT_OF_ROLE = (
    *("parallel.", "device", "layer_spec", "recompute", "microbatch_tokens", "microbatch_sequences"),
    "share_prompts",
    *("overlap_grad_reduce", "overlap_offload", "gradient_accumulation_fusion", "tp_comm_overlap"),
    *("moe.dispatcher", "moe.flex_backend", "moe.permute_fusion"),
)
MAX_STEPS_NAMED = 5


def settings_sum(identity: Identity) -> str:
    """A checksum of the settings that must be as they were, as lines of schedule.jsonl have it."""
    flat = flat_settings(identity.config)
    settings = {key: value for key, value in flat.items() if not _may_differ(key)}
    settings |= {key: None for key in flat if key.startswith(TAUGHT)}
    return sum_text(xxhash.xxh3_64(json.dumps(settings, sort_keys=True).encode()))


def keep_identity(identity: Identity, run_dir: Path) -> None:
    """Writes what the run is beside its recorded rollouts.  OSError: the disk is full, or fails."""
    (run_dir / RECORD).mkdir(exist_ok=True)
    identity.keep(run_dir / RECORD)


def last_recorded(identity: Identity, recorded: Path, after: int, num_steps: int) -> int:
    """The last step that can be replayed, of ``num_steps``.  Notes how the layout differs, and where the record ends.

    identity: of the replay.  recorded: the run directory of the other run.  after: the step that the replay resumes
    from, or 0.  ConfigError, with every violation: it cannot be replayed with this configuration.
    """
    if not (recorded / RECORD / RUN).is_file():
        problem = f"has no {RECORD}/{RUN}: nothing is recorded there"
        remedy = "Name a run that was run with trainer.record_rollouts=true"
        raise ConfigError([Violation(KEY, recorded, problem, remedy)])
    try:
        theirs = Identity.read(recorded / RECORD)
    except CheckpointError as error:
        problem = f"{RECORD}/{RUN} cannot be read: {error.problems[0]}"
        raise ConfigError([Violation(KEY, recorded, problem, "Restore it")]) from None
    violations = [*_other_files(identity, theirs), *_other_settings(identity, theirs)]
    steps, wrong = read_schedule(recorded / SCHEDULE)
    known = {step.step: step for step in steps}
    last = max([*known, *wrong], default=0)
    wanted = range(after + 1, min(last, num_steps) + 1)
    if missing := [step for step in wanted if step not in known or not record_file(recorded, step).is_file()]:
        named = ", ".join(map(str, missing[:MAX_STEPS_NAMED])) + (" and more" if missing[MAX_STEPS_NAMED:] else "")
        problem = f"step {named}: {SCHEDULE} has no line, or {RECORD}/ no file of it"
        violations.append(Violation(KEY, recorded, problem, "Restore them, or replay another run"))
    elif not wanted:
        problem = f"its record ends with step {last}, and the replay would go on after step {after}"
        violations.append(Violation(KEY, recorded, problem, "Let that run go on first, or replay another"))
    sums = {known[step].settings for step in wanted if step in known}
    if len(sums) > 1:
        first = next(step for step in wanted if step in known and known[step].settings != known[wanted[0]].settings)
        problem = f"step {first} was trained with other settings than those before it: the run was resumed with them"
        violations.append(Violation(KEY, recorded, problem, "A replay has one set of settings: replay another run"))
    refuse_if_any(violations)
    _note_differences(identity, theirs, recorded)
    if last < num_steps:
        note(f"{recorded} ends with step {last} of {num_steps}: so does its replay")
    return min(last, num_steps)


def _may_differ(key: str) -> bool:
    return _is_free(key) or _is_layout(key)


def _is_free(key: str) -> bool:
    return any(key == free or (free.endswith(".") and key.startswith(free)) for free in FREE)


def _is_layout(key: str) -> bool:
    if key in LAYOUT_OF_RUN:
        return True
    rest = key.partition(".")[2]
    return key.split(".")[0] not in ("rollout", "trainer", "data", "reward_model") and any(
        rest == each or (each.endswith(".") and rest.startswith(each)) for each in LAYOUT_OF_ROLE
    )


def _differing(identity: Identity, theirs: Identity) -> Iterator[tuple[str, Any, Any]]:
    """(key, its value now, its value then) where they differ."""
    ours = flat_settings(identity.config)
    before = flat_settings(theirs.config)
    for key in sorted(ours.keys() | before.keys()):
        if ours.get(key) != before.get(key):
            yield key, ours.get(key), before.get(key)


def _other_settings(identity: Identity, theirs: Identity) -> Iterator[Violation]:
    for key, now, then in _differing(identity, theirs):
        if not _may_differ(key) or (key.startswith(TAUGHT) and None in (now, then)):
            remedy = f"Write {key}={'null' if then is None else then}: a replay changes nothing that a step depends on"
            yield Violation(key, now, f"was {then} in the run that trainer.replay names", remedy)


def _other_files(identity: Identity, theirs: Identity) -> Iterator[Violation]:
    """Files of other content, whose keys may differ because files may move."""
    flat: Mapping[str, Any] = flat_settings(identity.config)
    for key, said in identity.changed(theirs):
        if key != "data.val_files":
            problem = f"{key}: {said.replace('checkpoint', 'record')}"
            yield Violation(key if key in flat else KEY, flat.get(key), problem, "Name the files of that run")
    if [each[1:] for each in identity.data] != [each[1:] for each in theirs.data]:
        problem = "are other data than those of the run that trainer.replay names"
        yield Violation("data.train_files", flat.get("data.train_files"), problem, "Name the same files")
    names = (identity.model.keys() | theirs.model.keys()) - {*UNIMPORTANT}
    if other := sorted(name for name in names if identity.model.get(name) != theirs.model.get(name)):
        problem = f"is another model than that of the run that trainer.replay names: {', '.join(other)}"
        yield Violation("model.path", flat.get("model.path"), problem, "Name the same model")


def _note_differences(identity: Identity, theirs: Identity, recorded: Path) -> None:
    layout = [f"{key}: {then} then, {now} now" for key, now, then in _differing(identity, theirs) if _is_layout(key)]
    if layout:
        said = f"Replaying {recorded} in another layout, so that bits may differ, by the order in which sums are taken:"
        note("\n  - ".join([said, *layout]))
    note(f"Replaying {recorded}: nothing is drawn or graded, and nothing is validated")
