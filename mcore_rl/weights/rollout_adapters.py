"""The table of the adapters that a rollout rank of vLLM holds beside its base weights, and which models can have them.

It follows from the family's rollout table as ``adapter_table`` follows from the trainer's: vLLM (0.32, lora/layers) has
an A and a B for each Hugging Face linear of a fused layer, in memory that is allocated once; of a layer whose rows are
split over tensor ranks A is whole and B has those rows, of one whose columns are split A has those columns and B is
whole (``fully_sharded_loras`` is off).  B holds the scale, as vLLM keeps it (``LoRALayerWeights.optimize``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from mcore_rl.config.lora import ACTOR_ADAPTER, ENGINE_RANKS, EngineAdapters, LoraConfig, PublishedLora
from mcore_rl.families.rules import Rule, Stage
from mcore_rl.ground.errors import Violation
from mcore_rl.weights.adapter_table import HEAD, AdaptedRule, AdapterTable, adapted_rule, linears, module_of
from mcore_rl.weights.rollout_table import RolloutTable
from mcore_rl.weights.table import Table

MERGED = f"Write rollout.lora={PublishedLora.merged.value}"


class RolloutAdapterTable(RolloutTable):
    """The adapters ``adapters`` on every rank of ``base``; their id in the engine is ``adapter``."""

    def __init__(self, base: RolloutTable, adapters: AdapterTable, adapter: int = ACTOR_ADAPTER) -> None:
        self.base = base
        self.lora = adapters.lora
        self.adapter = adapter
        self.adapted = adapted_rules(base.rules, adapters)
        rules = tuple(rule for each in self.adapted for rule in (*each.a, *each.b))
        family = replace(base.family, rollout=rules, rollout_without_latent=rules)
        super().__init__(family, base.model, base.layout)

    @property
    def engine_adapters(self) -> EngineAdapters:
        """What an engine must be started with to hold them."""
        ends = {each.rule.name.removesuffix(".weight").rpartition(".")[2] for each in self.adapted}
        return EngineAdapters(rank=self.lora.rank, modules=tuple(sorted(ends)), ids=(self.adapter,))

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that an element of one byte takes for them on a rank: vLLM has it for whole fused layers."""
        held = self.engine_adapters.held_rank
        total = 0
        for each in self.adapted:
            fused = adapted_rule(each.rule, _modules(each.rule), held)
            for rule in (*fused.a, *fused.b):
                total += prod(rule.local_shape(self.model, self.num_shards(rule))) * len(self.layers(rule))
        return total


def adapted_rules(rules: tuple[Rule, ...], adapters: AdapterTable) -> list[AdaptedRule]:
    """The adapters of vLLM's layers of ``rules``, without those of experts."""
    targets = {module for each in adapters.adapted.values() for module in each.modules}
    adapted = [
        adapted_rule(rule, [module for module in _modules(rule) if module in targets], adapters.lora.rank)
        for rule in rules
        if rule.stage is Stage.layer and not rule.stacked and rule.name.endswith(".weight")
    ]
    return [each for each in adapted if each.sources]


def _modules(rule: Rule) -> list[str]:
    return [module_of(tensor) for tensor in rule.hf]


def published_form(lora: LoraConfig, form: PublishedLora, table: Table) -> PublishedLora:
    """What engines hold of the adapters ``lora`` of the model of ``table``, as ``form`` asks for; never ``auto``."""
    if form is not PublishedLora.auto:
        return form
    unfit = not lora.rank or any(published_violations(lora, table, ""))
    return PublishedLora.merged if unfit else PublishedLora.adapter


def published_violations(lora: LoraConfig, table: Table, prefix: str) -> Iterator[Violation]:
    """Why vLLM cannot apply the adapters ``lora`` of the model of ``table``.  prefix: of their keys, with its dot."""
    held = PublishedLora.adapter.value
    model = table.model
    if lora.rank > ENGINE_RANKS[-1]:
        problem = f"is beyond {ENGINE_RANKS[-1]}, the greatest rank of adapters that vLLM applies (rollout.lora={held})"
        yield Violation(f"{prefix}rank", lora.rank, problem, f"Lower it. {MERGED} publishes any rank")
    for what, there in (("latent attention", model.mla), ("linear attention", model.linear_attention)):
        if there is not None:
            yield Violation("rollout.lora", held, f"vLLM 0.32 applies no adapters in the {what} of this model", MERGED)
            return
    adapters = AdapterTable(table, lora)
    ours = [module for each in adapters.adapted.values() for module in each.modules]
    theirs = {module for each in adapted_rules(table.family.rollout, adapters) for module in each.modules}
    if missing := sorted({module.rpartition(".")[2] for module in ours if module not in theirs}):
        attention = sorted({name.rpartition(".")[2] for name in linears(table) if "attn." in name})
        why = "the output projection has none" if missing == [HEAD] else "those of experts need Triton"
        problem = f"vLLM's adapters that are written here are of layers, and {why}: {', '.join(missing)}"
        remedy = f"{MERGED}, or {prefix}target_modules=[{','.join(attention)}]"
        yield Violation("rollout.lora", held, problem, remedy)
