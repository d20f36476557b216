"""Prepares a checkpoint's model, and checks whether it can be trained and sampled as configured.

The checks are of tensors, layouts, lengths and batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from mcore_rl.checkpoints.load import check_checkpoint
from mcore_rl.checkpoints.peft import changed_base, open_peft
from mcore_rl.checkpoints.peft_checkpoint import PeftCheckpoint
from mcore_rl.checkpoints.published import open_weights
from mcore_rl.config.algorithm_object import ACTOR
from mcore_rl.config.data import ImagesConfig
from mcore_rl.config.lora import EngineAdapters, PublishedLora
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.offline import OfflineConfig
from mcore_rl.config.pairs import sequences_per_prompt, trains_pairs, units_per_prompt
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.config.reward import RewardConfig
from mcore_rl.config.role import Head, Role
from mcore_rl.config.role_groups import POLICY
from mcore_rl.config.roles import BY_SOURCE, AdaptedConfig, RoleConfig, Teachers
from mcore_rl.config.rollout import BYTES, POSITIONS, context_violations, rollout_violations
from mcore_rl.config.run import RunConfig
from mcore_rl.config.trainer import PolicyModelConfig
from mcore_rl.controller.lifecycle.messages import note
from mcore_rl.data.media.placed import Placed
from mcore_rl.data.packing import budget_violations
from mcore_rl.data.pairs import MEMBERS
from mcore_rl.data.rows import named
from mcore_rl.data.tokenizer import vocabulary_difference
from mcore_rl.families.config_changes import ConfigChanges
from mcore_rl.families.config_json import read_config
from mcore_rl.families.registry import model_of, unread_fields
from mcore_rl.families.text_part import text_part_of
from mcore_rl.families.towers import PICTURES
from mcore_rl.ground.errors import CheckpointError, DataError, Violation
from mcore_rl.parallel.context import padded_rows
from mcore_rl.parallel.layout import Layout, layout_violations
from mcore_rl.weights.adapter_table import AdapterTable, target_violations
from mcore_rl.weights.rollout_adapters import RolloutAdapterTable, published_form, published_violations
from mcore_rl.weights.rollout_table import RolloutTable
from mcore_rl.weights.table import Table


def prepare_model(model: PolicyModelConfig, directory: Path, *, pictures: bool = False) -> None:
    """Make ``directory`` the view of ``model.path`` where config.json is changed, and note what is read in part.

    directory: that which every reader reads; ``model.path`` itself where nothing is changed.  pictures: whether a
    vision tower is read, too.

    Raises CheckpointError: no readable config.json, or the view cannot be written.  ConfigError: a change that nobody
    would read; a family or a field that is not supported.
    """
    source = Path(model.path)
    if model.is_changed:
        changes = ConfigChanges.of(model)
        _say(f"{source}: config.json is read with changes: {changes.describe(read_config(source))}")
        changes.view(source, directory)
    if not pictures and (part := text_part_of(read_config(directory))):
        rest = " and ".join(f"{name}*" for name in part.rest)
        trained = f"the text part, {part.text_architecture}, is trained and drawn from"
        _say(f"{source}: {part.architecture}: {trained}; {rest} are left as they are, and exported with it")
    if unread := unread_fields(read_config(directory)):
        said = "neither transformers nor vLLM reads these fields of config.json for this model, and they change nothing"
        _say(f"{source}: {said}: {', '.join(unread)}")


@cache  # once, though a run prepares again after every restart
def _say(text: str) -> None:
    note(text)


def sight_violations(config: RunConfig | OfflineConfig) -> Iterator[Violation]:
    """Refuses models without a vision tower that is read, where models are given the pictures of rows."""
    for role in config.group_rows if config.sees_pictures else ():
        for key, path in config.checkpoints_of(role).items():
            part = text_part_of(read_config(Path(path)))
            if part is None or part.model_type not in PICTURES:
                known = ", ".join(each.architectures[0] for each in PICTURES.values())
                problem = f"gives models pictures, and {key}={path} has no vision tower that is read"
                remedy = f"Name a checkpoint of one of {known}, or leave it out"
                assert isinstance(config.data, ImagesConfig), "else nothing sees pictures"
                yield Violation("data.image_key", config.data.image_key, problem, remedy)


def demand_weights(directory: Path, head: Head, *, pictures: bool = False) -> None:
    """Raises CheckpointError unless ``directory`` has the tensors that its config.json describes; reads headers.

    pictures: those of the vision tower, too.
    """
    family, model = model_of(read_config(directory), pictures=pictures)
    if head is Head.hidden:  # the role does without the output projection, and the policy's processes read it
        head = Head.lm
    with open_weights(directory, pictures=pictures) as checkpoint:
        check_checkpoint(checkpoint, Table(family, model, ParallelConfig(), 1, head=head))


def adapter_violations(config: RunConfig | OfflineConfig) -> Iterator[Violation]:
    """Adapters of layers that the models of the roles do not have.

    Raises CheckpointError for the adapters that a role begins with, as ``open_peft`` does, and where they bring tensors
    of the model itself that are not its.
    """
    for role in config.group_rows:
        of_role = config.role_config(role)
        if isinstance(of_role, AdaptedConfig) and of_role.lora.rank:
            family, model = model_of(read_config(Path(config.weights_of(role))), pictures=config.sees_pictures)
            table = Table(family, model, head=role.head)
            prefix = f"{role.name}.lora."
            wrong = list(target_violations(of_role.lora, table, prefix))
            if role.publishes and isinstance(config, RunConfig) and config.rollout.lora is PublishedLora.adapter:
                wrong += published_violations(of_role.lora, table, prefix)
            yield from wrong
            if of_role.lora.path and not wrong:
                directory = Path(of_role.lora.path)
                with open_peft(directory, AdapterTable(table, of_role.lora)) as adapters:
                    if adapters.base_copies:
                        _demand_own_base(adapters, Path(config.weights_of(role)), config.sees_pictures)


def _demand_own_base(adapters: PeftCheckpoint, base: Path, pictures: bool) -> None:
    with open_weights(base, pictures=pictures) as checkpoint:
        if problems := changed_base(adapters, checkpoint):
            raise CheckpointError(str(adapters.directory), problems)


def engine_adapters(config: RunConfig) -> EngineAdapters | None:
    """The adapters that the rollout engines apply; None: they hold whole weights."""
    lora = config.actor.lora
    rollout = config.rollout
    if not lora.rank:
        return None
    family, model = model_of(read_config(Path(config.model_directory)), pictures=config.sees_pictures)
    table = Table(family, model)
    if published_form(lora, rollout.published_lora, table) is PublishedLora.merged:
        return None
    held = RolloutAdapterTable(RolloutTable(family, model, rollout.layout), AdapterTable(table, lora))
    return held.engine_adapters


def model_run_violations(run: RunConfig, models: Mapping[str, ModelConfig]) -> list[Violation]:
    """Every reason why the policy cannot be sampled, or a role cannot compute, as ``run`` configures.

    models: of each role with processes of its own, by name, the policy's first.
    """
    policy = next(iter(models.values()))
    world = run.trainer.world_size
    violations = [*context_violations(policy, run.rollout), *rollout_violations(policy, run.rollout.layout)]
    for role in run.group_rows:
        model = models[role.name]
        violations += _layout_violations(model, run.role_config(role), world, role.name)
        if not role.publishes:
            violations += _other_model_violations(run, role, model, policy)
    if not violations:
        for role in run.trained_rows:
            violations += _share_violations(run, role)
        violations += _full_kl_violations(run, policy)
        if trains_pairs(run):
            pair = [run.data.max_prompt_length + run.data.max_response_length] * 2
            violations += unit_violations(ACTOR, run.actor, [pair], "longest pair")
    return violations


def _layout_violations(model: ModelConfig, config: RoleConfig, world_size: int, name: str) -> Iterator[Violation]:
    for each in layout_violations(model, config.parallel, world_size):
        yield replace(each, key=f"{name}.parallel.{each.key.removeprefix('parallel.')}")


def _other_model_violations(run: RunConfig, role: Role, model: ModelConfig, policy: ModelConfig) -> Iterator[Violation]:
    """Refuses a model that cannot read the policy's samples: too few tokens or positions."""
    (key, path), longest = next(iter(run.checkpoints_of(role).items())), run.rollout.max_model_len
    key = str(role.weights) if key == POLICY else key
    if role.head is not Head.value and model.vocab_size < policy.vocab_size:
        problem = f"has {model.vocab_size:,} tokens, and the policy {policy.vocab_size:,}: it cannot score all of them"
        yield Violation(key, path, problem, "Name a model with the policy's tokenizer")
    if model.vision is not None and policy.vision is not None:
        ours, theirs = (
            (each.patch_size, each.merge_size, each.temporal_patch_size) for each in (model.vision, policy.vision)
        )
        if ours != theirs:
            problem = f"has a tower of patches of {ours[0]} pixels, and the policy's are of {theirs[0]}"
            yield Violation(key, path, problem, "Name a model of the policy's family")
    if longest > model.max_position_embeddings:
        problem = f"has {model.max_position_embeddings:,} positions, and a sequence up to {longest:,} tokens"
        yield Violation(key, path, problem, "Name a model with more, or shorten data.max_*_length")


def vocabulary_violations(run: RunConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[Violation]:
    """Refuses a model that scores the policy's tokens, and to which their numbers mean other texts.

    The sizes of vocabularies may differ by padding (``_other_model_violations``).
    """
    for role in run.group_rows:
        for key, path in run.checkpoints_of(role).items():
            if role.publishes or role.head is Head.value or path == run.model_directory:
                continue
            try:
                problem = vocabulary_difference(tokenizer, path)
            except DataError as error:
                problem = f"its tokens cannot be compared with the policy's: {error}"
            if problem is not None:
                yield Violation(key, path, problem, "Name a model with the policy's tokenizer")


def answer_violations(reward: RewardConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[Violation]:
    """Refuses an end of thoughts that no graded text has: graders see responses without special tokens."""
    mark = reward.answer_after
    if not mark:
        return
    tokens = tokenizer.encode(mark, add_special_tokens=False)
    if mark.strip() not in str(tokenizer.decode(tokens, skip_special_tokens=True)):
        problem = "has a special token of the model, which graders do not see: every response would have no answer"
        yield Violation("reward.answer_after", mark, problem, "Leave it out, or write text that the model draws")


def teacher_violations(teachers: Teachers, sources: Sequence[str]) -> Iterator[Violation]:
    """Refuses rows that no teacher teaches, and teachers of no row.  sources: data sources of the rows to train on."""
    key = f"teacher.{BY_SOURCE}"
    there = sorted(set(sources))
    if untaught := sorted(teachers.untaught(there)):
        problem = f"names no teacher of the rows of {named(untaught)}"
        yield Violation(key, named([*teachers.by_source]), problem, "Name one, or teacher.path=DIR for all the rest")
    if idle := [source for source in teachers.by_source if source not in there]:
        problem = f"no row of data.train_files has the data source {named(idle)}; they have {named(there)}"
        yield Violation(key, named([*teachers.by_source]), problem, "Leave it out, or mend the name")


def _share_violations(run: RunConfig, role: Role) -> list[Violation]:
    config = run.trained_config(role)
    dp = Layout.of(config.parallel, run.trainer.world_size).dp
    size = config.ppo_mini_batch_size
    of_prompt = units_per_prompt(run)
    what = "pairs" if trains_pairs(run) else "sequences"
    if size * of_prompt >= dp:
        return []
    problem = f"makes {size * of_prompt} {what} a step, fewer than the {dp} data-parallel ranks of the {role.name}"
    return [Violation(f"{role.name}.ppo_mini_batch_size", size, problem, f"Write {-(-dp // of_prompt)} or more")]


def _full_kl_violations(run: RunConfig, model: ModelConfig) -> list[Violation]:
    """Refuses a full KL if the reference's logits at a minibatch's trained tokens exceed the host memory for them.

    An upper bound: every rank trains an equal number of sequences, rounded up, each of the greatest length.
    """
    actor = run.actor
    if not actor.with_full_kl:
        return []
    layout = Layout.of(actor.parallel, run.trainer.world_size)
    longest = -(-(run.data.max_prompt_length + run.data.max_response_length) // layout.cp)
    sequences = -(-actor.ppo_mini_batch_size * sequences_per_prompt(run) // layout.dp)
    tokens = sequences * min(run.data.max_response_length, longest)
    columns = -(-model.vocab_size // layout.tp)
    size = BYTES[actor.precision]
    gib = tokens * columns * size / 2**30
    if gib <= actor.full_kl_gib:
        return []
    problem = (
        f"a process keeps the reference's logits of a minibatch in host memory, {tokens:,} tokens x {columns:,} "
        f"columns x {size} bytes = {gib:.1f} GiB, which exceeds actor.full_kl_gib={actor.full_kl_gib:g}"
    )
    remedy = (
        "Write a smaller actor.ppo_mini_batch_size, a larger actor.parallel.tp or actor.full_kl_gib, or "
        "actor.kl_loss_type=k3, which estimates the same KL from one number a token"
    )
    return [Violation("actor.kl_loss_type", "full", problem, remedy)]


def unit_violations(
    name: str, config: RoleConfig, units: Sequence[Sequence[int]], unit: str = "row"
) -> Iterator[Violation]:
    """Sequences that one microbatch must hold together, and that do not fit into one.

    name: of the role.  units: the tokens of the sequences of each.  unit: what they are of.
    """
    parallel = config.parallel
    tokens = config.microbatch_tokens
    if tokens is None or not units:
        return
    costs = [padded_rows(each, parallel.cp, parallel.tp) for each in units]
    yield from budget_violations(costs, tokens, f"{name}.microbatch_tokens", unit)


def patch_violations(
    name: str, config: RoleConfig, media: Sequence[Sequence[Placed]], *, pairs: bool = False
) -> list[Violation]:
    """Rows with more patches than a microbatch may have.

    name: of the role.  media: the pictures of each row.  pairs: a microbatch must hold two sequences of a row.
    """
    if config.microbatch_patches is None or not media:
        return []
    sequences, unit = (MEMBERS, "pair") if pairs else (1, "row")
    costs = [sequences * sum(each.grid.patches for each in of_row) for of_row in media]
    return budget_violations(costs, config.microbatch_patches, f"{name}.microbatch_patches", unit, "patches")


def model_offline_violations(config: OfflineConfig, model: ModelConfig) -> list[Violation]:
    """Every reason why ``model`` cannot be trained as ``config`` says."""
    parallel = config.actor.parallel
    world = config.trainer.world_size
    violations = list(_layout_violations(model, config.actor, world, "actor"))
    if config.data.max_length > model.max_position_embeddings:
        problem = f"exceeds the model's {model.max_position_embeddings} tokens"
        remedy = f"Write {model.max_position_embeddings} or less, or if the model reaches further, {POSITIONS}"
        violations.append(Violation("data.max_length", config.data.max_length, problem, remedy))
    if not violations and config.data.train_batch_size < (dp := Layout.of(parallel, world).dp):
        problem = f"is fewer than the {dp} data-parallel ranks"
        violations.append(
            Violation("data.train_batch_size", config.data.train_batch_size, problem, f"Write {dp} or more")
        )
    return violations
