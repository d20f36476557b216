"""The table of what a LoRA run trains: the adapters of every adapted weight, and a value head where there is one.

It follows from the family's table.  Each Hugging Face linear has its own A and B, as in PEFT, also where Megatron fuses
several into one weight, and so has each expert.  Of a weight whose rows are split over tensor ranks, A is whole and B
has those rows; of one whose columns are split, A has those columns and B is whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mcore_rl.config.lora import ALL_LINEAR, LoraConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.role import Head
from mcore_rl.families.blocks import OUTPUT_TENSOR, VALUE_HEAD
from mcore_rl.families.rules import SIZES, Axis, HfTensor, Range, Rule, ShardRanges, Sizes, Stage, split, whole
from mcore_rl.ground.errors import Violation
from mcore_rl.weights.names import canonical
from mcore_rl.weights.table import LocalTensor, Table

PEFT = "base_model.model."  # before the names of PEFT's files
RANK = "rank"
_WEIGHT = ".weight"
HEAD = OUTPUT_TENSOR.name.removesuffix(_WEIGHT)  # the layer of the output projection
_LINEAR = re.compile(r"\.(?:linear_\w+|in_proj|out_proj)\.weight$")
# ``training/adapters.py`` keeps adapters in a module ``lora`` of the linear; one of grouped experts has one for each.
_DIALECTS = (
    (re.compile(r"\.mlp\.experts\.linear_fc([12])\.lora\.(\d+)\."), r".mlp.experts.local_experts.\2.linear_fc\1."),
    (re.compile(r"\.lora\.(?=lora_[AB]\.)"), "."),
)
_ADAPTER = re.compile(r"\.lora_[AB]\.\d+$")


@dataclass(frozen=True)
class AdapterTensor(HfTensor):
    """A tensor of PEFT's files.  rank: the size of the dimension ``RANK``."""

    rank: int

    def shape(self, model: ModelConfig) -> tuple[int, ...]:
        """The tensor's shape for ``model``."""
        return tuple(self.rank if dim == RANK else SIZES[dim](model) for dim in self.dims)


@dataclass(frozen=True)
class RowsOf:
    """The rows of Hugging Face tensor ``source`` in the shards of ``rule``, in their order."""

    rule: Rule
    source: int

    def __str__(self) -> str:
        return f"rows of {self.rule.hf[self.source].name}"

    def __call__(self, model: ModelConfig, sizes: Sizes, num_shards: int, index: int) -> ShardRanges:
        """As a ``ShardLayout``, with the padding of the rule's."""
        shard = self.rule.shard(model, num_shards, index)
        mine = ShardRanges.of([Range(0, each.begin, each.end) for each in shard.ranges if each.source == self.source])
        return replace(mine, size=mine.held + shard.size - shard.held)


@dataclass(frozen=True)
class AdaptedRule:
    """The adapters of one kind of weight: an A and a B for each source (place in ``rule.hf``) that is adapted."""

    rule: Rule
    sources: tuple[int, ...]
    a: tuple[Rule, ...]
    b: tuple[Rule, ...]

    @property
    def modules(self) -> list[str]:
        """The Hugging Face layers that are adapted."""
        return [module_of(self.rule.hf[source]) for source in self.sources]

    @property
    def splits_inputs(self) -> bool:
        """Whether tensor ranks hold columns of the weight, and not rows."""
        return self.rule.dim == 1

    def rows(self, model: ModelConfig, local: LocalTensor) -> list[int] | None:
        """For each row of ``local``, its row among those of all B's of the rank one after another.

        None: the same order.  -1: of a source without adapters.
        """
        if self.splits_inputs:
            return None
        ranges = self.rule.shard(model, local.num_shards, local.index).ranges
        starts = {}
        total = 0
        for source in self.sources:
            starts[source] = total
            total += sum(each.end - each.begin for each in ranges if each.source == source)
        rows = list[int]()
        for each in ranges:
            count = each.end - each.begin
            if each.source not in starts:
                rows += [-1] * count
                continue
            rows += range(starts[each.source], starts[each.source] + count)
            starts[each.source] += count
        return None if rows == list(range(total)) else rows


class AdapterTable(Table):
    """The tensors that a LoRA run trains, under PEFT's names.

    base: the table of all weights.  Raises ConfigError as ``Table`` does; ``target_violations`` says which targets are
    unknown.
    """

    def __init__(self, base: Table, lora: LoraConfig) -> None:
        self.base = base
        self.lora = lora
        targets = [name for name in linears(base) if _is_target(lora, name)]
        adapted = [adapted_rule(rule, targets, lora.rank) for rule in base.rules if _is_linear(rule)]
        self.adapted = {id(each.rule): each for each in adapted if each.sources}
        rules = tuple(rule for each in self.adapted.values() for rule in (*each.a, *each.b))
        family = replace(base.family, weights=rules, stacks=(), ignored=())
        super().__init__(family, base.model, base.parallel, base.layout.world_size, head=base.head)

    def canonical(self, key: str) -> str | None:
        """As ``Table.canonical``."""
        for pattern, spelling in _DIALECTS:
            key = pattern.sub(spelling, key)
        if _ADAPTER.search(key):
            return key
        return canonical(key) if self.head is Head.value and key == VALUE_HEAD.name else None


def adapter_name(module: str, which: str) -> str:
    """PEFT's name of half ``which``, A or B, of the adapter of the Hugging Face layer ``module``."""
    return f"{PEFT}{module}.lora_{which}.weight"


def linears(table: Table) -> list[str]:
    """The names of the Hugging Face layers that can be adapted, with ``{l}`` layer and ``{e}`` expert."""
    names = (module_of(tensor) for rule in table.rules if _is_linear(rule) for tensor in rule.hf)
    return list(dict.fromkeys(names))


def all_linear(table: Table) -> list[str]:
    """The layers that ``all-linear`` means: as in PEFT, all but the output projection."""
    return [name for name in linears(table) if name != HEAD]


def target_violations(lora: LoraConfig, table: Table, prefix: str) -> Iterator[Violation]:
    """Targets that the model of ``table`` does not have, with those that it has.  prefix: of the keys, with its dot."""
    names = linears(table)
    known = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
    for key in ("target_modules", "exclude_modules"):
        for target in getattr(lora, key):
            if (key, target) != ("target_modules", ALL_LINEAR) and not any(_names(target, name) for name in names):
                problem = f"names {target!r}, and {table.family.name} has no such linear layer"
                yield Violation(f"{prefix}{key}", getattr(lora, key), problem, f"Write some of {known}")
    if not any(_is_target(lora, name) for name in names):
        problem = f"and exclude_modules={lora.exclude_modules} leave no layer to adapt"
        yield Violation(f"{prefix}target_modules", lora.target_modules, problem, "Exclude fewer")


def _is_linear(rule: Rule) -> bool:
    in_layer = rule.stage is Stage.layer and _LINEAR.search(rule.name) is not None
    return in_layer or (rule.stage is Stage.last and rule.hf == (OUTPUT_TENSOR,))  # and no copy of the embedding


def module_of(tensor: HfTensor) -> str:
    """The layer whose weight ``tensor`` is."""
    assert tensor.name.endswith(_WEIGHT), f"{tensor.name}: no weight of a layer"
    return tensor.name.removesuffix(_WEIGHT)


def _names(target: str, module: str) -> bool:
    """Whether PEFT takes ``target`` for ``module``: its name, or whole parts at the end of it."""
    return module == target or module.endswith(f".{target}")


def _is_target(lora: LoraConfig, module: str) -> bool:
    named = any(_names(target, module) for target in lora.target_modules)
    wanted = named or (lora.target_modules == [ALL_LINEAR] and module != HEAD)
    return wanted and not any(_names(target, module) for target in lora.exclude_modules)


def adapted_rule(rule: Rule, targets: Sequence[str], rank: int) -> AdaptedRule:
    """The adapters of those layers in the weight of ``rule`` that are among ``targets``."""
    sources = tuple(source for source, tensor in enumerate(rule.hf) if module_of(tensor) in targets)
    pairs = [_pair(rule, source, rank) for source in sources]
    return AdaptedRule(rule, sources, tuple(a for a, _ in pairs), tuple(b for _, b in pairs))


def _pair(rule: Rule, source: int, rank: int) -> tuple[Rule, Rule]:
    """A and B of one Hugging Face linear."""
    tensor = rule.hf[source]
    outputs, inputs = tensor.dims
    local = rule.name.removesuffix(_WEIGHT)

    def of(which: str, dims: Sequence[str]) -> Rule:
        held = AdapterTensor(adapter_name(module_of(tensor), which), tuple(dims), rank)
        name = f"{local}.lora_{which}.{source}"
        return replace(
            rule, name=name, hf=(held,), layout=whole, dim=0, axis=Axis.none, checkpoint=None, stored_parts=()
        )

    a = of("A", (RANK, inputs))
    b = of("B", (outputs, RANK))
    if rule.dim == 1:
        assert rule.layout is split and len(rule.hf) == 1, f"{rule.name}: columns of one layer, cut evenly"
        return replace(a, layout=split, dim=1, axis=rule.axis), b
    return a, replace(b, layout=RowsOf(rule, source), axis=rule.axis)
