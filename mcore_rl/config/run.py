"""The configuration of ``mcore-rl train``, and the checks of all groups and of contradictions between them.

``run_violations`` opens no file and starts nothing; ``controller/lifecycle/model_checks.py`` checks what depends on the
checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, make_dataclass, replace
from functools import cache, partial
from math import isqrt
from typing import Any, TypeVar

from mcore_rl.config.algorithm import AlgorithmConfig, OffPolicy, algorithm_violations
from mcore_rl.config.algorithm_object import ACTOR, REFERENCE, TEACHER
from mcore_rl.config.algorithm_registry import (
    ESTIMATOR_KEY,
    LOSS_KEY,
    estimator,
    estimators,
    policy_loss,
    policy_losses,
)
from mcore_rl.config.asynchrony import AsyncConfig, mode_violations, trains_stale
from mcore_rl.config.bounds import CrossCheck, check
from mcore_rl.config.clipping import PpoClipConfig
from mcore_rl.config.data import DataConfig, data_violations
from mcore_rl.config.judge import judge_violations
from mcore_rl.config.names import Composed, has_key, value_at
from mcore_rl.config.pairs import PairsConfig, needs_answers, pair_violations
from mcore_rl.config.recipe import RecipeConfig
from mcore_rl.config.reward import CustomRewardFunction, RewardConfig, custom_violations
from mcore_rl.config.reward_model import RewardModelConfig, reward_model_violations
from mcore_rl.config.role import Every, Head, Role
from mcore_rl.config.role_groups import RoleGroups, picture_violations
from mcore_rl.config.role_table import ROLES, role_table
from mcore_rl.config.roles import BY_SOURCE, REST, ActorConfig, RoleConfig, RouterReplay, TeacherConfig, Teachers
from mcore_rl.config.rollout import (
    Quantization,
    RolloutConfig,
    ServingConfig,
    rollout_config_violations,
    routing_violations,
)
from mcore_rl.config.router_replay import replay_violations
from mcore_rl.config.schedule import schedule_violations
from mcore_rl.config.stages import Pass
from mcore_rl.config.trainer import Placement, PolicyModelConfig, RayInitConfig, TrainerConfig, trainer_violations
from mcore_rl.config.unread_keys import unread_violations
from mcore_rl.config.vllm_fields import TOWER_GRAPHS
from mcore_rl.ground.errors import ConfigError, Violation

T = TypeVar("T")


@dataclass(kw_only=True)
class RunConfig(RoleGroups, Composed):
    """All settings of ``mcore-rl train``.  A composed one has a group for each other role of the run, too."""

    recipe: RecipeConfig = field(default_factory=RecipeConfig)
    model: PolicyModelConfig = field(default_factory=PolicyModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    actor: ActorConfig = field(default_factory=PpoClipConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    custom_reward_function: CustomRewardFunction = field(default_factory=CustomRewardFunction)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    async_: AsyncConfig = field(default_factory=AsyncConfig)
    ray_init: RayInitConfig = field(default_factory=RayInitConfig)

    @classmethod
    def schema_for(cls, tree: Mapping[str, Any]) -> type[RunConfig]:
        """The schema with the keys of every estimator and loss, those of the user's files that ``tree`` names too."""
        named = (_named(tree, *key.split(".")) for key in (ESTIMATOR_KEY, LOSS_KEY))
        return _with_keys_of(*named)

    def narrowed(self) -> RunConfig:
        """The same with the keys of the chosen estimator and loss alone, and with the groups of the run's roles.

        Written keys that it then lacks are in ``absent``; a group of which one is written stays.  Unchanged if there is
        no such estimator or loss.
        """
        if _unknown_parts(self):
            return self
        chosen = replace(
            self,
            algorithm=_as(estimator(self.algorithm.adv_estimator).settings, self.algorithm),
            actor=_as(policy_loss(self.actor.loss_mode).settings, self.actor),
        )
        named = {*chosen.roles, *(key.partition(".")[0] for key in self.written)}
        roles = (role for role in self.role_table.values() if role.name in named)
        schema = _with_groups(tuple((role.name, role.config) for role in roles if role.config and not role.publishes))
        run = schema(**{each.name: getattr(chosen, each.name) for each in fields(schema)})
        run.absent = {key: value_at(self, key) for key in self.written if not has_key(run, key)}
        return run

    def __reduce__(self) -> tuple[Callable[..., RunConfig], tuple[Any, ...]]:
        """Pickles it by its groups: the class of a composed one is made in each process."""
        common = {each.name for each in fields(RunConfig)}
        groups = [each.name for each in fields(self) if each.name not in common]
        return _restored, (tuple((name, type(getattr(self, name))) for name in groups), vars(self))

    @property
    def sees_pictures(self) -> bool:
        """See ``RoleGroups.sees_pictures``."""
        return self.data.sees_pictures

    @property
    def role_table(self) -> Mapping[str, Role]:
        """All roles that a run with its estimator may have."""
        return role_table(self.algorithm.adv_estimator)

    @property
    def roles(self) -> tuple[str, ...]:
        """The names of the roles that the run builds, in the order of the table.

        These are the roles that the algorithm needs, and roles on request whose weights are named.
        Raises ConfigError if there is no such estimator.
        """
        in_loss = isinstance(self.actor, PairsConfig) and self.actor.preference.row.reference
        refers = self.algorithm.use_kl_in_reward or self.actor.use_kl_loss or in_loss
        needed = {ACTOR, *estimator(self.algorithm.adv_estimator).role_names, *([REFERENCE] if refers else [])}
        needed |= {TEACHER} if self.algorithm.distill.coef else set()
        return tuple(
            name
            for name, role in self.role_table.items()
            if name in needed or (role.on_request and self.has_weights(role))
        )

    @property
    def role_rows(self) -> tuple[Role, ...]:
        """The roles that the run builds, in the order of the table.

        The reference moves as ``ref_update_freq`` says.  The model of a teacher in the loss ends with hidden states.
        """
        changes: dict[str, dict[str, Any]] = {}
        if steps := self.algorithm.ref_update_freq:
            changes[REFERENCE] = {"moves": Every(steps)}
        if self.algorithm.distill.in_loss:
            changes[TEACHER] = {"head": Head.hidden}
        table = self.role_table
        return tuple(replace(table[name], **changes[name]) if name in changes else table[name] for name in self.roles)

    @property
    def teachers(self) -> Teachers | None:
        """Who teaches which rows; None: there is no teacher."""
        if TEACHER not in self.roles:
            return None
        named = self.checkpoints_of(ROLES[TEACHER])
        config = self.role_config(ROLES[TEACHER])
        assert isinstance(config, TeacherConfig)
        by_source = {source: named[f"{TEACHER}.{BY_SOURCE}.{source}"] for source in config.by_source}
        return Teachers(rest=named.get(REST), by_source=by_source)

    def loss_of(self, role: Role) -> Any:
        """The ``RoleLoss`` of a trained role; a teacher may be a term of the policy's."""
        loss = super().loss_of(role)
        distill = self.algorithm.distill
        teachers = self.teachers
        if not (role.publishes and distill.in_loss):
            return loss
        names = teachers.names if teachers is not None and teachers.are_several else ()
        return replace(loss, teacher=distill, taught_by=names)

    @property
    def scorers(self) -> dict[str, ServingConfig]:
        """The engines that score responses, by their configuration group: of the reward model, of the judge."""
        scorers: dict[str, ServingConfig] = {"reward_model": self.reward_model} if self.reward_model.enable else {}
        if self.reward.judge.path is not None:
            scorers["reward.judge.engines"] = self.reward.judge.engines
        return scorers

    @property
    def served_rollout(self) -> RolloutConfig:
        """``rollout`` as engines are started with: they record experts if the updates repeat them."""
        return replace(self.rollout, return_routed_experts=self.actor.router_replay is RouterReplay.r3)

    @property
    def needs_greedy(self) -> bool:
        """Whether each prompt is also answered greedily, for a baseline."""
        return estimator(self.algorithm.adv_estimator).greedy


@cache
def _with_keys_of(estimator_name: str, loss_name: str) -> type[RunConfig]:
    """The schema of a run with the keys of all estimators and losses, and of these two, which may be of files."""
    algorithms = {each.settings for each in estimators().values()}
    actors = {each.settings for each in policy_losses().values()}
    with suppress(ConfigError):  # a violation of ``run_violations``
        algorithms.add(estimator(estimator_name).settings)
    with suppress(ConfigError):
        actors.add(policy_loss(loss_name).settings)
    unions = {"algorithm": _union(AlgorithmConfig, algorithms), "actor": _union(ActorConfig, actors)}
    roles = role_table(estimator_name).values()
    others = {role.name: role.config for role in roles if role.config and not role.publishes}
    groups = [(name, kind, field(default_factory=kind)) for name, kind in (unions | others).items()]
    return make_dataclass(
        "AnyRunConfig", groups, bases=(RunConfig,), kw_only=True, namespace={"__doc__": RunConfig.__doc__}
    )


@cache
def _with_groups(groups: tuple[tuple[str, type[RoleConfig]], ...]) -> type[RunConfig]:
    """The schema of a run with these groups of roles beside the actor's, by name."""
    if not groups:
        return RunConfig
    made = [(name, kind, field(default_factory=kind)) for name, kind in groups]
    return make_dataclass(RunConfig.__name__, made, bases=(RunConfig,), kw_only=True)


def _restored(groups: tuple[tuple[str, type[RoleConfig]], ...], values: dict[str, Any]) -> RunConfig:
    run = object.__new__(_with_groups(groups))
    vars(run).update(values)
    return run


def _union(common: type[Any], kinds: Collection[type[Any]]) -> type[Any]:
    """A dataclass with the fields of all ``kinds``, which are subclasses of ``common``."""
    apart = [kind for kind in kinds if not any(kind is not each and issubclass(each, kind) for each in kinds)]
    bases = tuple(sorted(apart, key=lambda kind: (kind.__module__, kind.__name__)))
    named = f"Any{common.__name__}"
    return make_dataclass(named, [], bases=bases, kw_only=True, namespace={"__doc__": common.__doc__})


def _named(tree: Mapping[str, Any], group: str, name: str) -> str:
    values = tree.get(group)
    value = values.get(name) if isinstance(values, Mapping) else None
    return value if isinstance(value, str) else ""


def _as(kind: type[T], group: Any) -> T:
    """The settings of ``group`` that ``kind`` has, as such."""
    return kind(**{each.name: getattr(group, each.name) for each in fields(kind)})  # type: ignore[arg-type]


def any_run_schema() -> type[RunConfig]:
    """The schema with the keys of every estimator and policy loss of the package."""
    return _with_keys_of("", "")


def run_violations(run: RunConfig, *, planned: bool = False) -> list[Violation]:
    """Every violation that can be seen without opening a file of data or of a model.

    planned: nothing has to be there to train on or with, as for a plan.
    """
    unknown = _unknown_parts(run)
    rules: list[CrossCheck[RunConfig]] = [
        lambda run: data_violations(run.data),
        lambda run: algorithm_violations(run.algorithm),
        lambda run: rollout_config_violations(run.rollout),
        lambda run: routing_violations(run.rollout, "false; actor.router_replay=r3 lets engines record"),
        lambda run: custom_violations(run.custom_reward_function),
        lambda run: reward_model_violations(run.reward_model),
        lambda run: judge_violations(run.reward.judge),
        lambda run: trainer_violations(run.trainer),
        *(() if planned else (_missing,)),
        *(partial(_role_violations, role=role) for role in (() if unknown else run.group_rows)),
        *(() if unknown else [*estimator(run.algorithm.adv_estimator).rules, *policy_loss(run.actor.loss_mode).rules]),
        unread_violations,
        *(() if unknown else [_picture_violations]),
        mode_violations,
        _batch_violations,
        _gen_batch_violations,
        _length_violations,
        _group_violations,
        pair_violations,
        _distribution_violations,
        _uncorrected_violations,
        _kl_in_reward_violations,
        _teacher_violations,
        _warmup_violations,
        _schedule_violations,
        _loss_violations,
        _update_violations,
        _share_violations,
        replay_violations,
    ]
    return check(run, rules, beside=unknown)


def _role_violations(run: RunConfig, role: Role) -> list[Violation]:
    return run.role_config(role).violations(role.name)


def _picture_violations(run: RunConfig) -> Iterator[Violation]:
    """Settings of pictures that nothing reads, and parts of a run that read text alone."""
    yield from picture_violations(run.data, {role.name: run.role_config(role) for role in run.group_rows})
    if not run.sees_pictures:
        return
    blind = ["the reward model (reward_model.enable=true)"] if run.reward_model.enable else []
    if run.reward.judge.path is not None or run.reward.judge.address is not None:
        blind.append("the judge (reward.judge)")
    blind += [f"the rows' own answers ({ESTIMATOR_KEY}={run.algorithm.adv_estimator})"] if needs_answers(run) else []
    stages = [*estimator(run.algorithm.adv_estimator).stages]
    stages += [stage for role in run.role_rows for stage in role.stages(role, run)]
    if any(isinstance(stage, Pass) and stage.context is not None for stage in stages):
        blind.append(f"what a pass tells the model in the prompt's place ({ESTIMATOR_KEY})")
    for each in blind:
        problem = f"gives the policy pictures, and {each} would be read as text alone"
        yield Violation("data.image_key", run.data.image_key, problem, "Leave it out, or do without that part")
    graphs = run.rollout.engine.get("compilation_config")
    if isinstance(graphs, dict) and graphs.get(TOWER_GRAPHS):
        problem = "records graphs of the tower that take pixels, and engines here are told a picture's name"
        yield Violation("rollout.engine.compilation_config", graphs, problem, f"Leave {TOWER_GRAPHS} out")


def _unknown_parts(run: RunConfig) -> list[Violation]:
    violations: list[Violation] = []
    for part, name in ((estimator, run.algorithm.adv_estimator), (policy_loss, run.actor.loss_mode)):
        try:
            part(name)
        except ConfigError as error:
            violations += error.violations
    return violations


def _batch_violations(run: RunConfig) -> Iterator[Violation]:
    size = run.data.train_batch_size
    for role in run.trained_rows:
        mini = run.trained_config(role).ppo_mini_batch_size
        if size % mini:
            pairs = ((part, size // part) for part in range(1, isqrt(size) + 1) if size % part == 0)
            fitting = max(part for pair in pairs for part in pair if part <= mini)
            problem = f"does not divide data.train_batch_size={size}"
            yield Violation(f"{role.name}.ppo_mini_batch_size", mini, problem, f"Write {fitting}, say")


def _gen_batch_violations(run: RunConfig) -> list[Violation]:
    violations = []
    size = run.data.train_batch_size
    drawn = run.data.gen_batch_size
    filtering = run.algorithm.filter_groups.enable
    if drawn is not None and not filtering and drawn != size:
        problem = f"differs from data.train_batch_size={size}, and no groups are filtered"
        remedy = "Leave it out, or write algorithm.filter_groups.enable=true"
        violations.append(Violation("data.gen_batch_size", drawn, problem, remedy))
    attempts = run.algorithm.filter_groups.max_num_gen_batches
    if drawn is not None and filtering and drawn * attempts < size:
        problem = f"times algorithm.filter_groups.max_num_gen_batches={attempts} is less than "
        problem += f"data.train_batch_size={size}: a step could not be filled"
        remedy = f"Write {-(-size // attempts)} or more"
        violations.append(Violation("data.gen_batch_size", drawn, problem, remedy))
    return violations


def _length_violations(run: RunConfig) -> Iterator[Violation]:
    overlong = run.reward.overlong
    longest = run.data.max_response_length
    mean = run.data.mean_response_length
    if mean is not None and mean > longest:
        problem = f"is more than data.max_response_length={longest}"
        yield Violation("data.mean_response_length", mean, problem, "Write a mean within it, or leave it out")
    if overlong.enable and overlong.length is not None and overlong.length >= longest:
        problem = f"punishes every response, since data.max_response_length={longest}"
        remedy = f"Write {max(1, longest // 4)}, say"
        yield Violation("reward.overlong.length", overlong.length, problem, remedy)
    for name in ("max_prompt_length", "max_response_length"):
        here = getattr(run.data, name)
        there = getattr(run.rollout, name)
        if here != there:
            problem = f"differs from data.{name}={here}"
            yield Violation(f"rollout.{name}", there, problem, f"Leave it out: it is data.{name}")


def _group_violations(run: RunConfig) -> list[Violation]:
    violations = list[Violation]()
    algorithm = run.algorithm
    n = run.rollout.n
    name = algorithm.adv_estimator
    least = estimator(algorithm.adv_estimator).min_group
    if n < least:
        problem = f"algorithm.adv_estimator={name} compares the samples of a prompt, and needs {least} or more"
        violations.append(Violation("rollout.n", n, problem, "Write rollout.n=5, say, or another estimator"))
    if algorithm.filter_groups.enable and n < 2:
        problem = "algorithm.filter_groups.enable looks for groups whose rewards differ, and a group has one sample"
        violations.append(Violation("rollout.n", n, problem, "Write rollout.n=8, say, or enable=false"))
    return violations


def _distribution_violations(run: RunConfig) -> list[Violation]:
    violations = list[Violation]()
    algorithm = run.algorithm
    drawn = run.rollout
    if drawn.temperature == 0:
        problem = "greedy samples are of no distribution that could be trained"
        violations.append(Violation("rollout.temperature", 0, problem, "Write rollout.temperature=1.0"))
    reads_sampler = algorithm.reads_sampler
    if reads_sampler is not None and (drawn.top_p < 1 or drawn.top_k != -1):
        problem = "with top_p or top_k, sampler and trainer mean different distributions, and the ratio says nothing"
        remedy = "Write rollout.top_p=1.0 rollout.top_k=-1, or leave it out"
        violations.append(Violation(f"algorithm.{reads_sampler[0]}", reads_sampler[1], problem, remedy))
    return violations


def _uncorrected_violations(run: RunConfig) -> Iterator[Violation]:
    """Refuses to train on samples of quantised engines as if the trainer's weights had drawn them."""
    quantization = run.rollout.quantization
    off_policy = run.algorithm.off_policy
    if quantization is Quantization.none or off_policy is not OffPolicy.recompute or run.rollout.allow_uncorrected:
        return
    problem = "engines draw from rounded weights, and algorithm.off_policy=recompute trains as if the trainer had drawn"
    remedy = (
        "Write algorithm.off_policy=decoupled, which weighs each token by their ratio, cut off at "
        "algorithm.rollout_correction.upper; or insist: rollout.allow_uncorrected=true"
    )
    yield Violation("rollout.quantization", quantization.value, problem, remedy)


def _warmup_violations(run: RunConfig) -> Iterator[Violation]:
    if run.trainer.critic_warmup and len(run.trained_rows) == 1:
        problem = f"the actor alone is trained: algorithm.adv_estimator={run.algorithm.adv_estimator} needs no values"
        remedy = "Write trainer.critic_warmup=0 or algorithm.adv_estimator=gae"
        yield Violation("trainer.critic_warmup", run.trainer.critic_warmup, problem, remedy)


def _schedule_violations(run: RunConfig) -> list[Violation]:
    """Schedules and a run whose length is written; ``preparation`` checks those whose length follows from the data."""
    return list(schedule_violations(run, run.trainer.total_training_steps or 0))


def _loss_violations(run: RunConfig) -> list[Violation]:
    """Settings that contradict the policy loss."""
    violations = []
    actor = run.actor
    loss = policy_loss(run.actor.loss_mode)
    if loss.aggregation is not None and actor.loss_agg_mode is not loss.aggregation:
        problem = f"actor.loss_mode={loss.name} is defined with another ({loss.paper})"
        remedy = f"Write actor.loss_agg_mode={loss.aggregation.value}"
        violations.append(Violation("actor.loss_agg_mode", actor.loss_agg_mode.value, problem, remedy))
    if run.algorithm.off_policy is OffPolicy.bypass and not loss.needs_old:
        problem = f"actor.loss_mode={loss.name} has no ratio, and would not read the sampler's log-probs"
        remedy = "Write decoupled, which weighs this loss too, or another loss"
        violations.append(Violation("algorithm.off_policy", OffPolicy.bypass.value, problem, remedy))
    return violations


def _update_violations(run: RunConfig) -> list[Violation]:
    """More updates of a batch than the policy loss is right for."""
    violations = list[Violation]()
    actor = run.actor
    loss = policy_loss(run.actor.loss_mode)
    if loss.updates_per_batch is None or actor.allow_stale_updates:
        return violations
    size = run.data.train_batch_size
    reason = f"actor.loss_mode={loss.name} has no ratio, and is right for {loss.updates_per_batch} update of a batch"
    remedy = "or a loss with a ratio, actor.loss_mode=ppo_clip, or actor.allow_stale_updates=true"
    if trains_stale(run) and not run.algorithm.weighs:
        problem = f"trains batches of older weights than its own: {reason}"
        if run.rollout.partial:
            key = "rollout.partial"
            value = "true"
            instead = "false"
        else:
            key = "trainer.mode"
            value = run.trainer.mode.value
            instead = "sync"
        weighed = f"Write {instead}, or algorithm.off_policy=decoupled, {remedy}"
        violations.append(Violation(key, value, problem, weighed))
    if actor.ppo_epochs > loss.updates_per_batch:
        violations.append(Violation("actor.ppo_epochs", actor.ppo_epochs, reason, f"Write 1, {remedy}"))
    if actor.ppo_mini_batch_size < size and size % actor.ppo_mini_batch_size == 0:
        problem = f"is less than data.train_batch_size={size}: {reason}"
        violations.append(
            Violation("actor.ppo_mini_batch_size", actor.ppo_mini_batch_size, problem, f"Write {size}, {remedy}")
        )
    return violations


def _kl_in_reward_violations(run: RunConfig) -> list[Violation]:
    """Refuses a KL in the reward of an estimator that cannot read one."""
    reason = estimator(run.algorithm.adv_estimator).refuses_kl
    if not reason or not run.algorithm.use_kl_in_reward:
        return []
    problem = f"{run.algorithm.adv_estimator} {reason}"
    return [Violation("algorithm.use_kl_in_reward", True, problem, "Write false, and actor.use_kl_loss=true")]


def _teacher_violations(run: RunConfig) -> list[Violation]:
    """Refuses to distill from nobody; ``weights_of`` would answer with the policy's own first weights."""
    if TEACHER not in run.roles:
        return []
    if run.has_weights(ROLES[TEACHER]):
        config = run.role_config(ROLES[TEACHER])
        if not isinstance(config, TeacherConfig) or {"", REST}.isdisjoint(config.by_source):
            return []
        problem = f"an empty text and {REST} are no names of data sources"
        remedy = f"Name data sources; {REST} teaches all that are not named"
        return [Violation("teacher.by_source", config.by_source, problem, remedy)]
    problem = f"is not set, and algorithm.distill.coef={run.algorithm.distill.coef:g} learns from a teacher"
    remedy = "Write teacher.path=DIR, or to stay near the policy's first weights algorithm.use_kl_in_reward=true"
    return [Violation("teacher.path", None, problem, remedy)]


def _share_violations(run: RunConfig) -> list[Violation]:
    """Refuses memory shares above 1: colocated engines that draw and that score are awake on the same devices."""
    if not run.scorers or run.trainer.placement is Placement.separate:
        return []
    served = {"rollout": run.rollout, **run.scorers}
    (key, share), *others = reversed(
        [(f"{name}.gpu_memory_utilization", each.gpu_memory_utilization) for name, each in served.items()]
    )
    if share + sum(other for _, other in others) <= 1:
        return []
    beside = " and ".join(f"{name}={other:g}" for name, other in others)
    problem = f"and {beside} are more than a device, which all are awake on"
    return [Violation(key, share, problem, "Lower one of them, or write trainer.placement=separate")]


def _missing(run: RunConfig) -> Iterator[Violation]:
    if not run.model.path:
        yield Violation("model.path", "", "is not set", "Write model.path=DIR, a Hugging Face checkpoint")
    if not run.data.train_files and not run.trainer.val_only:
        yield Violation("data.train_files", "[]", "there is nothing to train on", "Write data.train_files=[FILE]")
    validates = run.trainer.val_only or run.trainer.test_freq
    if not run.data.val_files and validates:
        asked = "trainer.val_only" if run.trainer.val_only else f"trainer.test_freq={run.trainer.test_freq}"
        yield Violation("data.val_files", "[]", f"{asked} needs some", "Write data.val_files=[FILE]")
