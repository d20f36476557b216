"""The whole proof of one model, one training layout and one rollout layout: what ``mcore-rl verify`` says.

At full size: names and shapes by Megatron's modules and transformers' model class, exact cover, the reshard plan
(``verify.py``), and which rows and columns a training rank holds, by the statement (``full_size.py``).  At reduced
size, in the same layouts: where every single element is, by oracles that share nothing with the tables
(``placement.py``), and the plan followed element by element (``tracer.py``).  The reduced model keeps what decides how
rules cut (``reduced_config``).

Whatever is wrong becomes a failure of a check; nothing is raised but ConfigError, for what the user wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mcore_rl.checkpoints.hf_directory import HfCheckpoint
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.config.rollout import RolloutLayout, rollout_violations
from mcore_rl.families.family import Family
from mcore_rl.families.text_part import text_config
from mcore_rl.ground.errors import RolloutError, refuse_if_any
from mcore_rl.parallel.layout import layout_violations
from mcore_rl.proofs.adapter_mutation import LORA, VllmAdapters, adapter_case, rollout_adapter_case
from mcore_rl.proofs.full_size import full_size_failures, width_failures
from mcore_rl.proofs.hf_model import hf_shapes
from mcore_rl.proofs.mutation import OracleCase, case_failures, loaded_case, stated_case
from mcore_rl.proofs.placement import (
    VLLM_HEAD_DIM,
    Megatron,
    Vllm,
    name_failures,
    placement_failures,
    unreadable,
)
from mcore_rl.proofs.reshard_proof import reshard_failures
from mcore_rl.proofs.statements import NO_STATEMENT, STATEMENTS
from mcore_rl.proofs.tracer import reduced_config, subject_of, trace
from mcore_rl.proofs.verify import Check, Claims, ProofReport, check, checked, verify
from mcore_rl.weights.adapter_table import AdapterTable
from mcore_rl.weights.reshard import plan_reshard
from mcore_rl.weights.rollout_adapters import RolloutAdapterTable
from mcore_rl.weights.rollout_table import RolloutTable
from mcore_rl.weights.table import Table

MAX_LOADED = 64  # ranks of an engine that are loaded: each takes a quarter of a second

READABLE = "every rule: can be read"
NAMED = "every tensor of transformers' model: taken, on both sides"
STATED_FULL = "every row and column, at full size: on the ranks that the statement says"
WIDE = "every rollout rule, at full size: cuts wide tensors as it cuts narrow ones"
STATED = "every element, reduced: on the ranks that the statement says"
LOADED = "every element, reduced: on the ranks where vLLM's load puts it"
TRACED = "every element, reduced: the plan moves it there"
ADAPTED = "every element of adapters, reduced: with the rows and columns that the statement says"
APPLIED = "every element of adapters, reduced: where vLLM's load puts it, and the plan moves it there"


@dataclass(frozen=True, kw_only=True)
class ProofSubject:
    """What is proven.

    config: the content of config.json.  family: of it, or one with other tables.  rollout: None: the training side
    alone.  megatron, vllm: the oracles.  adapted: adapters of all linear layers are trained.  applied: the oracle of
    adapters, where vLLM applies them.
    """

    config: Mapping[str, Any]
    family: Family
    parallel: ParallelConfig
    world_size: int
    rollout: RolloutLayout | None
    megatron: Megatron
    vllm: Vllm
    adapted: bool = False
    applied: VllmAdapters | None = None


def prove(
    subject: ProofSubject,
    *,
    checkpoint: HfCheckpoint | None = None,
    notice: Callable[[str], None] = lambda proves: None,
) -> ProofReport:
    """Prove ``subject``; of a multimodal model the text part, or the whole if that is what its family reads.

    checkpoint: also compare its names and shapes with the tables.  notice: called with each claim before it is checked.
    Raises ConfigError where the configuration or a layout does not fit.
    """
    if subject.family.tower is None:
        subject = replace(subject, config=text_config(subject.config))
    _, model = subject_of(subject.config)
    violations = layout_violations(model, subject.parallel, subject.world_size)
    refuse_if_any(violations + (rollout_violations(model, subject.rollout) if subject.rollout else []))
    tables: list[tuple[Table, RolloutTable | None]] = []
    notice(READABLE)
    readable = check(READABLE, lambda: _tables(subject, model, tables))
    if readable.failures:  # whatever reads a table would raise the same
        return _report(subject, (readable,))
    table, rollout = tables[0]
    modules = partial(subject.megatron, model, subject.parallel, subject.world_size)
    full = verify(table, rollout, modules, checkpoint=checkpoint, notice=notice)
    rest: Claims = {
        NAMED: lambda: _named(subject, table, rollout),
        STATED_FULL: lambda: _stated_full(subject, table),
        STATED: lambda: _stated(subject),
    }
    if subject.rollout is not None:
        rest[WIDE] = partial(_wide, subject, subject.rollout)
        rest[LOADED] = lambda: _loaded(subject)
        rest[TRACED] = lambda: _traced(subject)
    if subject.adapted:
        rest[ADAPTED] = lambda: _adapted(subject)
    if subject.adapted and subject.rollout is not None and subject.applied is not None:
        rest[APPLIED] = lambda: _applied(subject)
    return replace(full, checks=(readable, *full.checks, *checked(rest, notice)))


def _report(subject: ProofSubject, checks: tuple[Check, ...]) -> ProofReport:
    return ProofReport(
        family=subject.family.name,
        layout=str(subject.parallel),
        world_size=subject.world_size,
        rollout=None if subject.rollout is None else str(subject.rollout),
        checks=checks,
        traffic=None,
    )


def _tables(
    subject: ProofSubject, model: ModelConfig, tables: list[tuple[Table, RolloutTable | None]]
) -> tuple[str, list[str]]:
    table = Table(subject.family, model, subject.parallel, subject.world_size)
    rollout = RolloutTable(subject.family, model, subject.rollout) if subject.rollout else None
    tables.append((table, rollout))
    return f"{len(table.rules)} and {len(rollout.rules) if rollout else 0} rules", list(unreadable(table, rollout))


def _named(subject: ProofSubject, table: Table, rollout: RolloutTable | None) -> tuple[str, list[str]]:
    """At full size.  What a family lists as ignored is no part of transformers' model."""
    tensors = hf_shapes(subject.config, subject.family.model_type)
    return f"{len(tensors):,} tensors", list(name_failures(table, rollout, tensors))


def _stated_full(subject: ProofSubject, table: Table) -> tuple[str, list[str]]:
    if subject.family.name not in STATEMENTS:
        return "", [NO_STATEMENT.format(family=subject.family.name)]
    shapes = hf_shapes(subject.config, subject.family.model_type)
    count, failures = full_size_failures(table, STATEMENTS[subject.family.name], subject.config, shapes)
    return f"{count:,} shards", failures


def _wide(subject: ProofSubject, rollout: RolloutLayout) -> tuple[str, list[str]]:
    count, failures = width_failures(subject.family, subject.config, rollout)
    return f"{count:,} shards", failures


def _stated(subject: ProofSubject) -> tuple[str, list[str]]:
    if subject.family.name not in STATEMENTS:
        return "", [NO_STATEMENT.format(family=subject.family.name)]
    case, failures = _case(subject)
    failures += placement_failures(partial(case.read, case.family), case.right, case.checkpoint, "rank")
    return f"{case.checkpoint.num_elements:,} elements, {len(case.right)} ranks", failures


def _case(subject: ProofSubject) -> tuple[OracleCase, list[str]]:
    """(the reduced model in the training layout, with what the oracle says; what is wrong with its statement)."""
    small = reduced_config(subject.config, subject.parallel, subject.rollout or RolloutLayout())
    return stated_case(small, subject.family, subject.parallel, subject.world_size, subject.megatron)


def _adapted(subject: ProofSubject) -> tuple[str, list[str]]:
    case = adapter_case(_case(subject)[0], subject.parallel, subject.world_size)
    return f"{case.checkpoint.num_elements:,} elements, {len(case.right)} ranks", case_failures(case)


def _applied(subject: ProofSubject) -> tuple[str, list[str]]:
    assert subject.rollout is not None and subject.applied is not None
    case = rollout_adapter_case(subject.config, subject.rollout, subject.applied)
    if case is None:
        return "", ["vLLM applies no adapters of this family. Write rollout.lora=merged"]
    _, model = subject_of(subject.config)
    trained = AdapterTable(Table(subject.family, model, subject.parallel, subject.world_size), LORA)
    held = RolloutAdapterTable(RolloutTable(subject.family, model, subject.rollout), trained)
    failures = [*case_failures(case), *reshard_failures(plan_reshard(trained, held))]
    return f"{case.checkpoint.num_elements:,} elements, {len(case.right)} ranks", failures


def _loaded(subject: ProofSubject) -> tuple[str, list[str]]:
    """Compare one engine; the other replicas of the rollout load the same."""
    assert subject.rollout is not None
    layout = subject.rollout
    if layout.engine_size > MAX_LOADED:  # experts over all replicas: over fewer of them
        dp = max(1, MAX_LOADED // layout.tp)
        layout = replace(layout, dp=dp, ep=layout.tp * dp)
    # vLLM's layers do not depend on pp; of key/value heads that several ranks share there are two, or tp's number.
    tp = 2 if subject.parallel.tp == 1 and layout.tp % 4 == 0 else subject.parallel.tp
    four_layers = replace(subject.parallel, tp=tp, pp=2, vpp=1, pipeline_layers=None, ep=1)
    small = reduced_config(subject.config, four_layers, layout, VLLM_HEAD_DIM)
    try:
        case = loaded_case(small, subject.family, layout, subject.vllm)
    except RolloutError as error:
        return "", [str(error)]
    failures = placement_failures(partial(case.read, case.family), case.right, case.checkpoint, "rollout rank")
    return f"{case.checkpoint.num_elements:,} elements, {len(case.right)} ranks", failures


def _traced(subject: ProofSubject) -> tuple[str, list[str]]:
    assert subject.rollout is not None
    return trace(subject.config, subject.parallel, subject.world_size, subject.rollout, subject.family)
