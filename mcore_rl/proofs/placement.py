"""Holds a table's word for every element of every parameter against those who decide where it is.

The elements of a Hugging Face checkpoint (its tensors by transformers' model class) are distinct integers.  Of
Megatron's parameters a statement written by hand says which integers they hold (``statements.py``), and Megatron's own
modules say which layer and expert they are (``training/meta.py``).  Of vLLM's, vLLM's own ``load_weights`` says it
(``rollout/vllm/oracle.py``).  The table must say the same of every parameter on every rank, and every element must
arrive.

Both oracles are given from outside: this package builds no module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from mcore_rl.checkpoints.megatron_checkpoint import saved_parts, stored_key
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.config.rollout import RolloutLayout
from mcore_rl.families.family import Family
from mcore_rl.families.rules import Rule
from mcore_rl.families.stacks import stacked_parts, stored_shapes
from mcore_rl.families.text_part import text_config
from mcore_rl.ground.arrays import Int64Array
from mcore_rl.parallel.layout import Layout
from mcore_rl.proofs.hf_model import HfShapes
from mcore_rl.proofs.statements import Holder, Statement, stated
from mcore_rl.proofs.tracer import NumberedCheckpoint, index, training_tensor
from mcore_rl.weights.names import canonical
from mcore_rl.weights.rollout_table import RolloutTable, RolloutTensor
from mcore_rl.weights.table import LocalTensor, Table

ABSENT = "may be absent"
NOTHING = -1  # an element that a load leaves as it was; 0 is padding


@dataclass(frozen=True, slots=True)
class Stored:
    """What a table or an oracle says of one parameter of one rank.

    numbers: of its elements, in its shape.  facts: what else decides how it is read and written, by name.
    """

    numbers: Int64Array
    facts: Mapping[str, object]


ParameterPlacement = Mapping[str, Stored]  # of one rank, by the names of its parameters


@dataclass(frozen=True, slots=True)
class MegatronTensor:
    """What Megatron says of a parameter or persistent buffer.

    dtype: torch's name, where it is not the model's.  layer, expert: in the whole model; None: in none.  stored: (key,
    rows of this rank) of each tensor that a Megatron checkpoint has for it, in the order of its rows.
    """

    shape: tuple[int, ...]
    dtype: str | None
    layer: int | None
    expert: int | None
    stored: tuple[tuple[str, int], ...]

    @property
    def facts(self) -> dict[str, object]:
        """As ``Stored.facts``.  Every parameter of a language model is in its checkpoint."""
        return {
            "layer": self.layer,
            "expert": self.expert,
            "dtype": self.dtype,
            "stored as": self.stored,
            ABSENT: False,
        }


@dataclass(frozen=True)
class MegatronRank:
    """What Megatron's modules of one rank say.

    chunks: of each model chunk, by the keys of its state dict.  tp, etp: its place among ``num_tp`` tensor and
    ``num_etp`` expert tensor ranks.
    """

    chunks: list[dict[str, MegatronTensor]]
    tp: int
    num_tp: int
    etp: int
    num_etp: int

    @property
    def shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """The shapes alone."""
        return [{key: tensor.shape for key, tensor in chunk.items()} for chunk in self.chunks]


# (model, layout, number of ranks, rank) -> what Megatron's modules of the rank say.
Megatron = Callable[[ModelConfig, ParallelConfig, int, int], MegatronRank]
# (config.json, shapes of its checkpoint, layout, whether latent attention is on) -> where vLLM puts it, by rank.
Vllm = Callable[[Mapping[str, Any], HfShapes, RolloutLayout, bool], Mapping[int, ParameterPlacement]]
VLLM_HEAD_DIM = 32  # vLLM's attention on a CPU knows few

# ---- the oracle of the training side ----


class TrainingOracle:
    """Which integers every Megatron parameter of every rank of a layout holds, without a table.

    config: the content of config.json.  ranks: what Megatron says, by the rank's number; copies of a replica may be
    left out.  ``failures`` names what the statement lacks or contradicts Megatron's modules in.
    """

    def __init__(
        self,
        statement: Statement,
        config: Mapping[str, Any],
        checkpoint: NumberedCheckpoint,
        ranks: Mapping[int, MegatronRank],
    ) -> None:
        self.checkpoint = checkpoint
        self.failures: list[str] = []
        self._statement = statement
        self._whole = {name: checkpoint.read(name) for name in checkpoint}
        text = text_config(config)
        self._kv_heads = text.get("num_key_value_heads") or text["num_attention_heads"]
        self._linear_key_heads = text.get("linear_num_key_heads", 0)
        self.placements = {rank: self._stated(rank, modules) for rank, modules in ranks.items()}
        arrived = (stored.numbers for placement in self.placements.values() for stored in placement.values())
        self.failures += [f"the statement: {failure}" for failure in missing(arrived, checkpoint)]

    def _stated(self, rank: int, modules: MegatronRank) -> dict[str, Stored]:
        tied = "lm_head.weight" not in self._whole
        placement = {}
        ranks = (modules.tp, modules.num_tp, modules.etp, modules.num_etp)
        holder = Holder(*ranks, self._kv_heads, tied, linear_key_heads=self._linear_key_heads)
        for chunk, tensors in enumerate(modules.chunks):
            for key, tensor in tensors.items():
                try:
                    numbers = stated(self._statement, self._whole, key, tensor.layer, tensor.expert, holder)
                except Exception as error:  # noqa: BLE001  of a line that somebody writes for a new family
                    self.failures.append(f"rank {rank}: {key}: not stated: {type(error).__name__}: {error}")
                    continue
                if numbers.shape != tensor.shape:
                    problem = f"its statement makes shape {numbers.shape}, and Megatron's module has {tensor.shape}"
                    self.failures.append(f"rank {rank}: {key}: {problem}")
                placement[_name(chunk, canonical(key) or key)] = Stored(numbers, tensor.facts)
        return placement


def _name(chunk: int, name: str) -> str:
    return f"chunk {chunk} {name}"


# ---- what the tables say ----

Said = list[tuple[str, Stored]]  # (name, word) of every tensor of a rank; a name stands twice where two rules make it


def facts_of(table: Table, local: LocalTensor) -> dict[str, object]:
    """What the training table ``table`` says of ``local``, as ``MegatronTensor.facts``."""
    stored = tuple((stored_key(part)[0], table.shape(part)[0]) for part in saved_parts(local))
    return {
        "layer": local.layer,
        "expert": local.expert,
        "dtype": local.rule.dtype,
        "stored as": stored,
        ABSENT: local.rule.absent_ok,
    }


class TrainingWord:
    """What a training table says, in the words of an oracle."""

    def __init__(self, table: Table, checkpoint: NumberedCheckpoint) -> None:
        self.rules = table.rules
        self._table = table
        self._checkpoint = checkpoint
        self._numbers = lru_cache(maxsize=None)(self._numbers_of)
        self._locals: dict[tuple[Rule, int | None, int | None, int, int], LocalTensor] = {}

    def of(self, rank: int) -> Said:
        """Every tensor of ``rank``."""
        said = []
        for local in self._table.tensors(rank):
            said.append((_name(local.chunk, local.name), Stored(self._of(local), facts_of(self._table, local))))
        return said

    def shards(self, rule: Rule) -> list[object]:
        """The shards of ``rule``."""
        layout = self._table.layout
        locals_ = (local for rank in range(layout.world_size) for local in self._table.tensors(rank))
        return list({local.index: self._table.shard(local) for local in locals_ if local.rule is rule}.values())

    def _of(self, local: LocalTensor) -> Int64Array:
        key = (local.rule, local.layer, local.expert, local.num_shards, local.index)
        self._locals.setdefault(key, local)
        return self._numbers(key)

    def _numbers_of(self, key: tuple[Rule, int | None, int | None, int, int]) -> Int64Array:
        return training_tensor(self._table, self._locals[key], self._checkpoint)


class RolloutWord:
    """What a rollout table says, in the words of an oracle."""

    def __init__(self, rollout: RolloutTable, checkpoint: NumberedCheckpoint) -> None:
        self.rules = rollout.rules
        self._table = rollout
        self._checkpoint = checkpoint

    def of(self, rank: int) -> Said:
        """Every parameter of ``rank``; one in which several rules take turns is one, if they fill it."""
        parts: dict[str, list[RolloutTensor]] = {}
        for tensor in self._table.tensors(rank):
            parts.setdefault(tensor.parameter, []).append(tensor)
        said: Said = []
        for name, tensors in parts.items():
            wanted = [(turn, tensors[0].rule.turn[1]) for turn in range(tensors[0].rule.turn[1])]
            alike = {(tensor.rule.dtype, self._table.parameter_shape(tensor)) for tensor in tensors}
            whole = len(alike) == 1 and sorted(tensor.rule.turn for tensor in tensors) == wanted
            for together in [tensors] if whole else [[tensor] for tensor in tensors]:
                said.append((name, Stored(self._numbers(together), {"dtype": together[0].rule.dtype})))
        return said

    def _numbers(self, tensors: Sequence[RolloutTensor]) -> Int64Array:
        """The elements of a parameter that ``tensors`` take turns in."""
        parameter = np.full(self._table.parameter_shape(tensors[0]), NOTHING, dtype=np.int64)
        for tensor in tensors:
            numbers = np.zeros(self._table.shape(tensor), dtype=np.int64)
            for slot, piece in self._table.pieces(tensor):
                numbers[index(piece.local_region, slot)] = self._checkpoint.read(piece.hf, piece.hf_region)
            parameter[(*(slice(None),) * tensor.rule.stacked, *tensor.turns)] = numbers
        return parameter

    def shards(self, rule: Rule) -> list[object]:
        """The shards of ``rule``."""
        count = self._table.num_shards(rule)
        return [rule.shard(self._table.model, count, number) for number in range(count)]


Word = TrainingWord | RolloutWord


def training_word(family: Family, *, like: Table, checkpoint: NumberedCheckpoint) -> TrainingWord:
    """The word of the training table of ``family``, for the model and the layout of ``like``."""
    return TrainingWord(Table(family, like.model, like.parallel, like.layout.world_size), checkpoint)


def rollout_word(
    family: Family, *, like: RolloutTable, checkpoint: NumberedCheckpoint, latent_attention: bool = True
) -> RolloutWord:
    """The word of the rollout table of ``family``, for the model and the layout of ``like``."""
    return RolloutWord(RolloutTable(family, like.model, like.layout, latent_attention=latent_attention), checkpoint)


def first_ranks(layout: Layout) -> list[int]:
    """The first rank of each part of the model; the others hold copies."""
    places: dict[tuple[int, ...], int] = {}
    for rank in range(layout.world_size):
        at = layout.coords(rank)
        places.setdefault((at.pp, at.tp, at.ep, at.etp), rank)
    return list(places.values())


# ---- the comparison ----


def module_failures(table: Table, rank: int, modules: MegatronRank) -> Iterator[str]:
    """Parameters of which the table and Megatron's modules name another layer, expert, dtype or stored tensors."""
    locals_ = {(local.chunk, local.name): local for local in table.tensors(rank)}
    for chunk, tensors in enumerate(modules.chunks):
        for key, tensor in tensors.items():
            local = locals_.get((chunk, canonical(key) or key))
            if local is None:
                continue  # ``bind`` names it
            said = facts_of(table, local)
            for what, value in tensor.facts.items():
                if said[what] != value and what != ABSENT:  # ``name_failures`` names that
                    yield f"rank {rank}: {key}: {what} is {said[what]} by its rule, and {value} by Megatron"


def rank_failures(
    rank: str,
    said: Said,
    right: ParameterPlacement,
    checkpoint: NumberedCheckpoint,
    only: Collection[str] | None = None,
) -> Iterator[str]:
    """A message for every parameter of one rank of which ``said`` is not ``right``.

    only: compare the parameters of these names alone, and those that are said and are not there.
    """
    rules = Counter(name for name, _ in said)
    yield from (f"{rank} {name}: {count} rules make it" for name, count in rules.items() if count > 1)
    for name in right.keys() - rules.keys():
        if only is None or name in only:
            yield f"{rank} {name}: no rule makes it"
    for name, word in said:
        if name not in right:
            yield f"{rank} {name}: a rule makes it, and there is no such parameter"
        elif (problem := _difference(word, right[name], checkpoint)) is not None:
            yield f"{rank} {name}: {problem}"


def _difference(said: Stored, right: Stored, checkpoint: NumberedCheckpoint) -> str | None:
    if said.numbers.shape != right.numbers.shape:
        return f"its rule makes shape {said.numbers.shape}, and it has {right.numbers.shape}"
    if (problem := misplaced(said.numbers, right.numbers, checkpoint, "elements")) is not None:
        return problem
    for what, value in right.facts.items():
        if said.facts[what] != value:
            return f"{what} is {said.facts[what]} by its rule, and {value}"
    return None


def misplaced(said: Int64Array, right: Int64Array, checkpoint: NumberedCheckpoint, of: str) -> str | None:
    """The first number of ``said`` that is not that of ``right``; None if there is none.  of: what is counted."""
    wrong = np.flatnonzero(said != right)
    if not len(wrong):
        return None
    ours, theirs = (int(numbers.ravel()[wrong[0]]) for numbers in (said, right))
    at = tuple(map(int, np.unravel_index(wrong[0], said.shape)))
    return (
        f"its rule puts {checkpoint.name_of(ours)} at {at}, where {checkpoint.name_of(theirs)} belongs "
        f"({len(wrong):,} of {said.size:,} {of} are wrong)"
    )


def idle_axes(word: Word) -> Iterator[str]:
    """Rules whose axis cuts them into shards that are all the same: a rank would take another's copy for its own."""
    for rule in word.rules:
        shards = word.shards(rule)
        if len(shards) > 1 and all(shard == shards[0] for shard in shards):
            yield f"{rule.name}: its rule cuts it over {len(shards)} ranks ({rule.axis}), and all would hold the same"


def missing(arrived: Iterable[Int64Array], checkpoint: NumberedCheckpoint) -> Iterator[str]:
    """A message for every Hugging Face tensor of which not every element is among ``arrived``."""
    seen = np.zeros(checkpoint.num_elements + 1, dtype=bool)
    for numbers in arrived:
        seen[numbers.ravel()] = True
    for name, shape in checkpoint.shapes.items():
        held = int(seen[checkpoint.start_of(name) :][: prod(shape)].sum())
        if held != prod(shape):
            yield f"{name}: {prod(shape) - held:,} of its {prod(shape):,} elements are in no parameter"


def placement_failures(
    make: Callable[[], Word], right: Mapping[int, ParameterPlacement], checkpoint: NumberedCheckpoint, ranks: str
) -> list[str]:
    """Everything that a table says and that is not ``right``, by name; what cannot be read is a failure too.

    make: reads the table.  right: by the oracle, of each rank of a replica.  ranks: what a message calls a rank.
    """

    def failures() -> Iterator[str]:
        word = make()
        arrived = []
        for rank, placement in right.items():
            said = word.of(rank)
            arrived += [stored.numbers for _, stored in said]
            yield from rank_failures(f"{ranks} {rank}:", said, placement, checkpoint)
        yield from idle_axes(word)
        yield from missing((stored.numbers for each in right.values() for stored in each.values()), checkpoint)
        yield from missing(arrived, checkpoint)

    return list(dict.fromkeys(attempt(failures)))


def attempt(failures: Callable[[], Iterable[str]]) -> Iterator[str]:
    """``failures``, and the error that ends them as one more: a wrong rule may raise anything."""
    try:
        yield from failures()
    except Exception as error:  # noqa: BLE001
        yield f"it cannot be read: {type(error).__name__}: {error}"


def unreadable(table: Table, rollout: RolloutTable | None) -> Iterator[str]:
    """A message for each rule that raises an error when it is read alone."""

    def training(rule: Rule) -> None:
        family = replace(table.family, weights=(rule,))
        alone = Table(family, table.model, table.parallel, table.layout.world_size)
        for rank in range(min(table.layout.world_size, table.layout.tp * table.layout.pp)):
            for local in alone.tensors(rank):
                alone.pieces(local)

    def rolled_out(rule: Rule) -> None:
        assert rollout is not None
        for number in range(rollout.num_shards(rule)):
            rule.shard(rollout.model, rollout.num_shards(rule), number)
        rule.local_shape(rollout.model, rollout.num_shards(rule))

    rules: Sequence[tuple[Rule, Callable[[Rule], None]]] = [(rule, training) for rule in table.rules]
    for rule, read in [*rules, *((rule, rolled_out) for rule in (rollout.rules if rollout else ()))]:
        for failure in attempt(lambda read=read, rule=rule: read(rule) or ()):  # type: ignore[misc]
            yield f"the rule of {rule.name}: {failure}"


def name_failures(table: Table, rollout: RolloutTable | None, tensors: HfShapes) -> Iterator[str]:
    """Hugging Face tensors that transformers' model has and no rule takes, or the other way round."""
    parts = stacked_parts(table.family.stacks, table.model)
    taken = {name: info.shape for name, info in table.hf_tensors.items()}
    yield from _names("training", stored_shapes(taken, parts, table.model), tensors)
    absent = [name for name, info in table.hf_tensors.items() if info.absent_ok]
    yield from (f"{name}: its rule lets a checkpoint lack it, and transformers' model needs it" for name in absent)
    if rollout is None:
        return
    held = {}
    for rule in rollout.rules:
        moe = rollout.model.moe
        experts = range(moe.num_experts) if rule.per_expert and moe else [None]
        for layer in rollout.layers(rule):
            for tensor in rule.hf:
                shape = tensor.shape(rollout.model)
                held.update({tensor.name.format(l=layer, e=expert): shape for expert in experts})
    yield from _names("rollout", stored_shapes(held, parts, table.model), tensors)


def _names(side: str, held: HfShapes, tensors: HfShapes) -> Iterator[str]:
    for name, shape in tensors.items():
        if name not in held:
            yield f"{name} of shape {shape} is in transformers' model, and no {side} rule takes it"
        elif held[name] != shape:
            yield f"{name}: its {side} rule says shape {held[name]}, and transformers' model has {shape}"
    for name in held.keys() - tensors.keys():
        yield f"{name}: a {side} rule takes it, and transformers' model has no such tensor"
