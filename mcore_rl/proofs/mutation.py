"""The mutation score of a family: how many of its wrong tables the proof names.

A mutant is a family with one rule changed in one place: deleted, another source of the same shape, sources in another
order, another axis, layout, stage, dimension or other layers, and so on.  Two rules that have each other's sources are
one mutant too, because each name is then still consumed once.

It is judged where the proof judges a table (``placement.py``), in several models and layouts of one family: what
its changed rules say of every parameter is held against the oracles.  It is

- failed: a message names what is wrong;
- unchanged: in every model and layout it says what the right table says, and ``why_unchanged`` knows why;
- survived: neither.  One survivor is a hole in the proof.

The oracles are asked once for each model and layout, and mutants are integers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import partial
from itertools import combinations
from types import FunctionType
from typing import Any, TypeVar

import numpy as np

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.parallel import ParallelConfig, parse_layout
from mcore_rl.config.rollout import RolloutLayout, parse_rollout_layout
from mcore_rl.families.blocks import tied, untied
from mcore_rl.families.family import Family
from mcore_rl.families.registry import FAMILIES
from mcore_rl.families.rules import (
    SIZES,
    Axis,
    HfTensor,
    Layers,
    Rule,
    Sections,
    ShardRanges,
    Sizes,
    Stage,
    always,
    replicated_qkv,
)
from mcore_rl.families.text_part import text_config
from mcore_rl.ground.errors import ConfigError, WeightMapError
from mcore_rl.parallel.layout import layout_violations
from mcore_rl.proofs.hf_model import hf_shapes
from mcore_rl.proofs.placement import (
    VLLM_HEAD_DIM,
    Megatron,
    ParameterPlacement,
    Said,
    TrainingOracle,
    Vllm,
    Word,
    first_ranks,
    idle_axes,
    placement_failures,
    rank_failures,
    rollout_word,
    training_word,
)
from mcore_rl.proofs.statements import NO_STATEMENT, STATEMENTS
from mcore_rl.proofs.tracer import EXPERTS, NumberedCheckpoint, numbered, reduced_config, subject_of
from mcore_rl.weights.rollout_table import RolloutTable
from mcore_rl.weights.table import Table

T = TypeVar("T")
UNJUDGED = "unjudged"
WRONG_KEY = "decoder.layers.{l}.self_attention.wrong.weight"
TABLES = ("weights", "rollout", "rollout_without_latent")


@dataclass(frozen=True)
class Mutant:
    """One wrong table.

    table: the field of ``Family`` that is wrong.  rule: the name of the rule.  part: what is changed of it, a field of
    ``Rule``, or another word for what happened to it.  change: how, in words.  family: with the wrong table.
    """

    table: str
    rule: str
    part: str
    change: str
    family: Family

    def __str__(self) -> str:
        return f"{self.table}: {self.rule}: {self.part} {self.change}".rstrip()


def with_rules(family: Family, table: str, rules: tuple[Rule, ...]) -> Family:
    """``family`` with other ``rules`` in ``table``."""
    changes: dict[str, Any] = {table: rules}
    return replace(family, **changes)


def mutants(family: Family, table: str, models: Sequence[ModelConfig]) -> Iterator[Mutant]:
    """Every mutant of a ``table`` of ``family``.

    models: of the family, which say what has equal shape.  A rule that none of them has is a mutant of its own, without
    a change: nobody can judge it.
    """
    rules: tuple[Rule, ...] = getattr(family, table)

    def made(at: int, part: str, change: str, *new: Rule) -> Mutant:
        wrong = with_rules(family, table, (*rules[:at], *new, *rules[at + 1 :]))
        return Mutant(table, rules[at].name, part, change, wrong)

    for number, rule in enumerate(rules):
        model = next((model for model in models if rule.only(model)), None)
        if model is None:
            yield Mutant(table, rule.name, UNJUDGED, "no model of the cases has it", family)
            continue
        yield made(number, "deleted", "")
        yield made(number, "doubled", "", rule, rule)
        for part, change, values in _changes(rule, rules, model):
            try:
                wrong = replace(rule, **values)  # type: ignore[arg-type]
            except AssertionError:
                continue  # a rule that cannot be written
            yield made(number, part, change, wrong)
    yield from _exchanges(family, table, models)


def _changes(rule: Rule, rules: tuple[Rule, ...], model: ModelConfig) -> Iterator[tuple[str, str, dict[str, object]]]:
    """(part, change in words, new values of fields) of each way to get ``rule`` wrong."""
    sources = list(dict.fromkeys(tensor for other in rules if other.only(model) for tensor in other.hf))
    for place, held in enumerate(rule.hf):
        for other in sources:
            if other != held and other.shape(model) == held.shape(model):
                yield "hf", f"{held.name} is {other.name}", {"hf": _with(rule.hf, place, other)}
    for first, second in combinations(range(len(rule.hf)), 2):
        change = f"{rule.hf[first].name} and {rule.hf[second].name} change places"
        yield "hf", change, {"hf": _swapped(rule.hf, first, second)}
    if len(rule.hf) > 1:
        for place, held in enumerate(rule.hf):
            yield "hf", f"lacks {held.name}", {"hf": rule.hf[:place] + rule.hf[place + 1 :]}
    tables = (getattr(family, table) for family in FAMILIES.values() for table in TABLES)
    layouts: list[Any] = list(dict.fromkeys(each.layout for some in (*tables, rules) for each in some))
    choices: dict[str, list[object]] = {
        "layout": [*layouts, *_other_sections(rule, layouts)],
        "axis": list(Axis),
        "stage": list(Stage),
        "layers": list(Layers),
        "dim": list(range(max(len(rule.hf[0].dims), 2))),
        "stacked": [False, True],
        "turn": [(0, 1), (0, 2), (1, 2)],
        "dtype": [None, "float32"],
        "absent_ok": [False, True],
        "only": [always, _never],
        "checkpoint": [] if rule.stored_parts else [*([None] if rule.checkpoint else []), WRONG_KEY],
        "stored_parts": _other_parts(rule),
    }
    assert choices.keys() | {"name", "hf", "per_expert"} == {field.name for field in fields(Rule)}
    for part, values in choices.items():
        for value in values:
            if value != getattr(rule, part):
                yield part, f"is {_words(value)}", {part: value}


def _other_parts(rule: Rule) -> list[object]:
    """Ways to store ``rule`` in other parts: whole, in another order, or under another name."""
    parts = rule.stored_parts
    if parts:
        return [(), *(_swapped(parts, *pair) for pair in combinations(range(len(parts)), 2))]
    return [] if rule.dim or rule.checkpoint else [(("wrong", rule.hf[0].dims[0]),)]


@dataclass(frozen=True)
class _Exchanged:
    """``sections`` that takes two of them for each other: the tensor has its parts in another order."""

    sections: Sections
    first: int
    second: int

    def __call__(self, model: ModelConfig, sizes: Sizes, num_shards: int, index: int) -> ShardRanges:
        inner = [SIZES[part](model) for part in self.sections.parts]
        order = _swapped(tuple(range(len(inner))), self.first, self.second)
        places = self.sections.places(model, sizes)
        shard = self.sections.layout(model, [inner[part] for part in order], num_shards, index)
        moved = [places[order[each.source]].moved(each) for each in shard.ranges]
        return ShardRanges.of(moved, shard.size)

    def __str__(self) -> str:
        return f"{_words(self.sections)}, of which numbers {self.first} and {self.second} change places"


def _other_sections(rule: Rule, layouts: Sequence[Any]) -> Iterator[Any]:
    """The sections of a fused tensor cut in another way, of exchanged sizes, and one taken for another."""
    if not isinstance(rule.layout, Sections):
        return
    sections = rule.layout
    yield from (replace(sections, layout=layout) for layout in layouts if not isinstance(layout, Sections))
    for first, second in combinations(range(len(sections.parts)), 2):
        yield replace(sections, parts=_swapped(sections.parts, first, second))
        yield _Exchanged(sections, first, second)


def _never(model: ModelConfig) -> bool:
    return False


def _with(hf: tuple[HfTensor, ...], place: int, tensor: HfTensor) -> tuple[HfTensor, ...]:
    return (*hf[:place], tensor, *hf[place + 1 :])


def _swapped(values: tuple[T, ...], first: int, second: int) -> tuple[T, ...]:
    changed = list(values)
    changed[first], changed[second] = changed[second], changed[first]
    return tuple(changed)


def _words(value: Any) -> str:
    if isinstance(value, Sections):
        return f"{_words(value.layout)} of {', '.join(value.parts)}"
    if isinstance(value, FunctionType):
        return str(value.__qualname__).replace(".<locals>.", " ").strip("_")
    return str(value)


def _exchanges(family: Family, table: str, models: Sequence[ModelConfig]) -> Iterator[Mutant]:
    """Two rules whose sources have equal shapes, with each other's."""
    rules: tuple[Rule, ...] = getattr(family, table)
    for (first, a), (second, b) in combinations(enumerate(rules), 2):
        model = next((model for model in models if a.only(model) and b.only(model)), None)
        if model is not None and a.hf != b.hf and a.hf_shapes(model) == b.hf_shapes(model):
            wrong = list(rules)
            wrong[first] = replace(a, hf=b.hf)
            wrong[second] = replace(b, hf=a.hf)
            yield Mutant(table, a.name, "exchanged", f"with {b.name}", with_rules(family, table, tuple(wrong)))


NOT_STORED = "only training rules are in Megatron's checkpoints"
TRAINING = ("tp=2,pp=2,vpp=2", "tp=2", "pp=2")
TRAINING_EXPERTS = ("tp=2,pp=2,ep=2,etp=1", "tp=2,pp=2,ep=2,etp=2")
ROLLOUT = ("tp=4",)
ROLLOUT_EXPERTS = ("tp=2,dp=2,ep=2", "tp=2,dp=2,ep=4")

# Fields of config.json that decide which rules a family's model has, in the values that its models have.
TIES: dict[str, Any] = {"tie_word_embeddings": True}
NO_TIES: dict[str, Any] = {"tie_word_embeddings": False}
VARIANTS: tuple[dict[str, Any], ...] = (
    TIES,
    NO_TIES,
    {"q_lora_rank": None},
    {"attention_bias": False},
    {"use_qk_norm": False},
    {"full_attention_interval": 4, "num_key_value_heads": 1},  # of qwen3_next, whose attention cuts gates within a head
)


@dataclass(frozen=True)
class OracleCase:
    """One model, one layout and what the oracle says of it.

    table: the field of ``Family`` that it judges.  config: of the model.  right: by rank.  read: makes the word of a
    family's table.
    """

    table: str
    name: str
    config: Mapping[str, Any]
    family: Family
    model: ModelConfig
    checkpoint: NumberedCheckpoint
    right: Mapping[int, ParameterPlacement]
    read: Callable[[Family], Word]


class MutantVerdict(Enum):
    """What became of a mutant."""

    failed = "failed"
    unchanged = "unchanged"
    survived = "survived"


@dataclass(frozen=True)
class Judged:
    """A mutant and its verdict.  why: the first failure, the reason why it changes nothing, or what let it live."""

    mutant: Mutant
    verdict: MutantVerdict
    why: str


# ---- the cases ----


def variants(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """``config`` and what it is with each of ``VARIANTS`` that its family has and does not refuse."""
    made = [dict(config)]
    for changes in VARIANTS:
        changed = dict(config) | changes
        if changed in made or not changes.keys() <= config.keys() | TIES.keys():
            continue
        if not _refused(changed):
            made.append(changed)
    return made


def _refused(config: Mapping[str, Any]) -> bool:
    try:
        subject_of(config)
    except ConfigError:
        return True
    return False


def _fits(config: Mapping[str, Any], layout: str) -> bool:
    """Whether a small model of ``config`` can be trained in ``layout``."""
    parallel = parse_layout(layout)
    _, model = subject_of(reduced_config(config, parallel, RolloutLayout()))
    return not layout_violations(model, parallel, _world_size(parallel))


def _world_size(parallel: ParallelConfig) -> int:
    return parallel.tp * parallel.pp * max(1, parallel.ep * parallel.etp // parallel.tp)


def training_layouts(config: Mapping[str, Any]) -> list[str]:
    """The training layouts in which tables of a small model of ``config`` are judged."""
    layouts = (*TRAINING, *(TRAINING_EXPERTS if has_experts(config) else ()))
    return [each for each in layouts if _fits(config, each)]


def rollout_layouts(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The rollout layouts in which tables of a small model of ``config`` are judged."""
    return (*ROLLOUT, *(ROLLOUT_EXPERTS if has_experts(config) else ()))


def has_experts(config: Mapping[str, Any]) -> bool:
    """Whether the model of a ``config.json`` has experts."""
    return any(name in text_config(config) for name in EXPERTS)


def training_case(config: Mapping[str, Any], layout: str, megatron: Megatron) -> OracleCase:
    """The case of a family's ``weights`` in ``layout``.  Raises WeightMapError if its statement is wrong or missing."""
    parallel = parse_layout(layout)
    small = reduced_config(config, parallel, RolloutLayout())
    family, _ = subject_of(small)
    case, failures = stated_case(small, family, parallel, _world_size(parallel), megatron)
    if failures:
        raise WeightMapError(f"the statement of {family.name}", failures)
    return replace(case, name=layout)


def stated_case(
    config: Mapping[str, Any], family: Family, parallel: ParallelConfig, world_size: int, megatron: Megatron
) -> tuple[OracleCase, list[str]]:
    """(the case of the ``weights`` of ``family`` for a reduced ``config``, what is wrong with the statement)."""
    _, model = subject_of(config)
    checkpoint = numbered(hf_shapes(config, family.model_type), family, model)
    table = Table(family, model, parallel, world_size)
    ranks = {rank: megatron(model, parallel, world_size, rank) for rank in first_ranks(table.layout)}
    oracle = TrainingOracle(STATEMENTS[family.name], config, checkpoint, ranks)
    read = partial(training_word, like=table, checkpoint=checkpoint)
    case = OracleCase("weights", str(parallel), config, family, model, checkpoint, oracle.placements, read)
    return case, oracle.failures


def rollout_case(config: Mapping[str, Any], layout: str, vllm: Vllm, *, latent_attention: bool = True) -> OracleCase:
    """The case of a family's ``rollout``, or of ``rollout_without_latent``, in ``layout``."""
    target = parse_rollout_layout(layout)
    small = reduced_config(config, parse_layout("tp=2,pp=2"), target, VLLM_HEAD_DIM)
    family, _ = subject_of(small)
    return replace(loaded_case(small, family, target, vllm, latent_attention=latent_attention), name=layout)


def loaded_case(
    config: Mapping[str, Any], family: Family, layout: RolloutLayout, vllm: Vllm, *, latent_attention: bool = True
) -> OracleCase:
    """The case of the rollout table of ``family`` for a reduced ``config``, by vLLM's load of its checkpoint."""
    _, model = subject_of(config)
    checkpoint = numbered(hf_shapes(config, family.model_type), family, model)
    right = vllm(config, checkpoint.shapes, layout, latent_attention)
    like = RolloutTable(family, model, layout, latent_attention=latent_attention)
    read = partial(rollout_word, like=like, checkpoint=checkpoint, latent_attention=latent_attention)
    table = "rollout" if latent_attention else "rollout_without_latent"
    return OracleCase(table, str(layout), config, family, model, checkpoint, right, read)


def cases(config: Mapping[str, Any], megatron: Megatron | None, vllm: Vllm | None) -> list[OracleCase]:
    """All cases of the family of ``config``; without Megatron's or vLLM's where that is None."""
    made = list[OracleCase]()
    for variant in variants(config):
        if megatron is not None:
            made += [training_case(variant, layout, megatron) for layout in training_layouts(variant)]
        if vllm is not None:
            layouts = rollout_layouts(variant)
            made += [rollout_case(variant, layout, vllm) for layout in layouts]
            if made[-1].family.rollout_without_latent:
                made += [rollout_case(variant, layout, vllm, latent_attention=False) for layout in layouts]
    return made


def case_failures(case: OracleCase) -> list[str]:
    """What the right table of ``case`` gets wrong."""
    read = partial(case.read, case.family)
    return placement_failures(read, case.right, case.checkpoint, f"{case.table} in {case.name}: rank")


# ---- the verdicts ----


def judge_all(cases: Sequence[OracleCase], leave_out: Collection[str] = ()) -> Iterator[Judged]:
    """Every mutant of the tables that ``cases`` judge, but for those in the parts ``leave_out``."""
    for table in dict.fromkeys(case.table for case in cases):
        mine = [case for case in cases if case.table == table]
        judge = MutantJudge(mine)
        wrong = mutants(mine[0].family, table, [case.model for case in mine])
        yield from (judge(mutant) for mutant in wrong if mutant.part not in leave_out)


class MutantJudge:
    """Judges the mutants of one table by ``cases``."""

    def __init__(self, cases: Sequence[OracleCase]) -> None:
        self._cases = cases
        self._kept: dict[tuple[int, int, tuple[int, ...]], Said] = {}

    def __call__(self, mutant: Mutant) -> Judged:
        """The verdict over ``mutant``."""
        if mutant.part == UNJUDGED:
            return self._unjudged(mutant)
        right = getattr(self._cases[0].family, mutant.table)
        wrong = getattr(mutant.family, mutant.table)
        before, after = (Counter(map(id, rules)) for rules in (right, wrong))
        old = tuple(rule for rule in right if before[id(rule)] != after[id(rule)])
        new = tuple(rule for rule in wrong if before[id(rule)] != after[id(rule)])
        taking_turns = {rule.name for rule in (*old, *new) if rule.turn != (0, 1)}
        partners = tuple(r for r in right if r.name in taking_turns and before[id(r)] == after[id(r)])
        old = (*old, *partners)  # only together do they make a parameter
        new = (*new, *partners)
        for number, case in enumerate(self._cases):
            try:
                changed, failure = self._failure(number, case, old, new)
            except Exception as error:  # noqa: BLE001  a wrong rule may raise anything
                why = f"the rule of {mutant.rule} cannot be read: {type(error).__name__}: {error}"
                return Judged(mutant, MutantVerdict.failed, why)
            if failure:
                return Judged(mutant, MutantVerdict.failed, failure)
            if changed:
                return Judged(mutant, MutantVerdict.survived, f"{case.name} says something else and passes")
        reason = why_unchanged(mutant, (*old, *new)[0], [case.model for case in self._cases])
        return Judged(
            mutant,
            MutantVerdict.unchanged if reason else MutantVerdict.survived,
            reason or "unchanged without a reason",
        )

    def _unjudged(self, mutant: Mutant) -> Judged:
        """Judge a rule that no model of the cases has: unchanged, if the family refuses the models that would."""
        named = [rule for rule in getattr(mutant.family, mutant.table) if rule.name == mutant.rule]
        nobody = next(rule for rule in named if not any(rule.only(case.model) for case in self._cases))
        for wanted, changes in ((tied, TIES), (untied, NO_TIES)):
            if nobody.only is wanted and all(_refused(dict(case.config) | changes) for case in self._cases):
                return Judged(mutant, MutantVerdict.unchanged, f"the family refuses a config.json with {changes}")
        return Judged(mutant, MutantVerdict.survived, mutant.change)

    def _failure(
        self, number: int, case: OracleCase, old: tuple[Rule, ...], new: tuple[Rule, ...]
    ) -> tuple[bool, str | None]:
        """(whether the changed rules say something else in ``case``, the first failure)."""
        word = case.read(with_rules(case.family, case.table, new))
        changed = any(a.axis is not b.axis for a, b in zip(old, new, strict=False))
        for rank, right in case.right.items():
            said = word.of(rank)
            before = self._before(number, case, rank, old)
            if _same(said, before):
                continue
            changed = True
            names = {name for name, _ in before}
            for failure in rank_failures(f"{case.name}: rank {rank}:", said, right, case.checkpoint, names):
                return True, failure
        if changed:
            for failure in idle_axes(word):
                return True, failure
            changed = any(not _same(word.of(rank), self._before(number, case, rank, old)) for rank in case.right)
        return changed, None

    def _before(self, number: int, case: OracleCase, rank: int, old: tuple[Rule, ...]) -> Said:
        key = (number, rank, tuple(map(id, old)))
        if key not in self._kept:
            once = tuple({id(rule): rule for rule in old}.values())
            self._kept[key] = case.read(with_rules(case.family, case.table, once)).of(rank)
        return self._kept[key]


def _same(one: Said, other: Said) -> bool:
    if len(one) != len(other):
        return False
    by_name = dict(other)
    return all(
        name in by_name and word.facts == by_name[name].facts and np.array_equal(word.numbers, by_name[name].numbers)
        for name, word in one
    )


def why_unchanged(mutant: Mutant, rule: Rule, models: Sequence[ModelConfig]) -> str | None:
    """Why ``mutant``, whose ``rule`` was another, changes nothing that a table says; None: there is no known reason."""
    training = mutant.table == "weights"
    without_experts = all(model.moe is None for model in models)
    if rule.layers is Layers.experts and without_experts:
        return "the family has no experts, so the rule makes nothing"
    without_dense = all(model.moe and not model.moe.dense_layers for model in models)
    one_kind = without_experts or without_dense
    cutting = mutant.part == "axis" or (rule.axis is Axis.expert_tensor and mutant.part in ("layout", "dim"))
    if training and cutting and all(model.linear_bias for model in models):
        return "the family's experts have biases, so no layout cuts them"
    all_attend = all(model.linear_attention is None for model in models)
    if rule.layers is Layers.dense and without_dense:
        return "the family has experts in every layer, so the rule makes nothing"
    known = {
        "layout": _why_layout_unchanged(rule, models),
        "dim": "no axis cuts it, so no dimension is divided" if rule.axis is Axis.none else None,
        "axis": "without experts the axes of experts cut as tp does" if without_experts else None,
        "layers": "the family's layers are all of one kind, or the rule is outside the layers"
        if one_kind or rule.stage is not Stage.layer
        else "the family has no linear attention, so every layer attends"
        if all_attend and rule.layers is Layers.all
        else None,
        "stage": None if training else "a rollout rank has every stage; the stage orders what is sent",
        "stacked": "only rollout rules say whether experts are stacked" if training else None,
        "checkpoint": None if training else NOT_STORED,
        "stored_parts": None if training else NOT_STORED,
        "absent_ok": None if training else "only training rules are read from a checkpoint",
        "only": "every model of the family has the rule" if rule.only in (tied, untied) else None,
    }
    return known.get(mutant.part)


def _why_layout_unchanged(rule: Rule, models: Sequence[ModelConfig]) -> str | None:
    if rule.axis is Axis.none:
        return "no axis cuts it, and its one shard is the whole tensor"
    if len(rule.hf) == 1 and not isinstance(rule.layout, Sections):
        return "it cuts one tensor, whose rows the shards divide evenly, into the same ranges"
    if rule.layout is replicated_qkv and all(model.joint_qk_norm or model.attention_sinks for model in models):
        return "vLLM runs the family on no more ranks than key/value heads, so no head has a copy"
    return None


@dataclass(frozen=True)
class FamilyScore:
    """The verdicts over a family's mutants.  failures: why it could not be judged; empty: it was."""

    family: str
    judged: tuple[Judged, ...]
    failures: tuple[str, ...] = ()

    @property
    def survived(self) -> list[Judged]:
        """The holes in the proof."""
        return [each for each in self.judged if each.verdict is MutantVerdict.survived]

    @property
    def counts(self) -> dict[str, Counter[MutantVerdict]]:
        """Verdicts by table."""
        counts: dict[str, Counter[MutantVerdict]] = {}
        for each in self.judged:
            counts.setdefault(each.mutant.table, Counter())[each.verdict] += 1
        return counts

    @property
    def reasons(self) -> Counter[str]:
        """Why mutants change nothing, and how many."""
        return Counter(each.why for each in self.judged if each.verdict is MutantVerdict.unchanged)

    def as_json(self) -> dict[str, Any]:
        """A dictionary that ``json.dump`` can write, with every mutant that did not fail."""
        kept = [each for each in self.judged if each.verdict is not MutantVerdict.failed]
        return {
            "family": self.family,
            "failures": list(self.failures),
            "tables": {table: {v.value: n for v, n in counts.items()} for table, counts in self.counts.items()},
            "not_failed": [{"mutant": str(e.mutant), "verdict": e.verdict.value, "why": e.why} for e in kept],
        }


def family_score(config: Mapping[str, Any], megatron: Megatron, vllm: Vllm) -> FamilyScore:
    """Judge every mutant of the family of ``config``, a small model of it."""
    family, _ = subject_of(config)
    if family.name not in STATEMENTS:
        return FamilyScore(family.name, (), (NO_STATEMENT.format(family=family.name),))
    try:
        made = cases(config, megatron, vllm)
    except WeightMapError as error:
        return FamilyScore(family.name, (), tuple(error.problems))
    return score_of(family.name, made)


def score_of(name: str, cases: Sequence[OracleCase], leave_out: Collection[str] = ()) -> FamilyScore:
    """The score by ``cases``.  Where they refuse the right table, nothing that they say of a mutant is of use."""
    refused = [failure for case in cases for failure in case_failures(case)]
    return FamilyScore(name, () if refused else tuple(judge_all(cases, leave_out)), tuple(refused))
