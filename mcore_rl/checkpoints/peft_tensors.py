"""Adapters as PEFT's files have them, made of those of the tables: an A and a B for each Hugging Face linear.

transformers 5 keeps the experts of a layer in two parameters, ``gate_up_proj`` and ``down_proj``.  PEFT (0.21) wraps
each parameter once (``ParamWrapper`` in peft/tuners/lora/layer.py): A is ``[experts * rank, inputs]``, expert by
expert, and B ``[outputs, rank * experts]``, in which experts take turns.  Gate and up, which have adapters of their own
here, share the rank there: A has one below the other, B is block diagonal.  The wrapper of the later parameter is the
outer one; the other's name has ``base_layer``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mcore_rl.checkpoints.stacked import expert_parameters
from mcore_rl.families.blocks import HF_LAYER
from mcore_rl.families.stacks import Stack, StackedPart
from mcore_rl.weights.adapter_table import HEAD, PEFT, AdapterTable, module_of

WITHIN_WHOLE = "model.language_model."  # where transformers 5 has the text model's ``model.`` in a multimodal one


def adapter_name(module: str, which: str) -> str:
    """The name of half ``which``, A or B, of the adapter of ``module``."""
    return f"{PEFT}{module}.lora_{which}.weight"


def in_whole(name: str) -> str:
    """The name that a tensor of the text model has in a multimodal model of transformers 5."""
    return re.sub(rf"^{re.escape(PEFT)}model\.", f"{PEFT}{WITHIN_WHOLE}", name)


def of_text(name: str) -> str:
    """A name of PEFT's files as it is of the text model alone: transformers 5 and 4 have had it within the whole."""
    within = "|".join(map(re.escape, (WITHIN_WHOLE, "language_model.model.")))
    name = re.sub(rf"^{re.escape(PEFT)}(?:{within})", f"{PEFT}model.", name)
    return name.replace(f"{PEFT}language_model.lm_head.", f"{PEFT}lm_head.")


def targets_in_whole(targets: Sequence[str]) -> str:
    """PEFT's pattern of the layers of the text model ``targets``; a tower has layers of the same names."""
    of_layers = "|".join(re.escape(target) for target in targets if target != HEAD)
    patterns = [rf"{re.escape(WITHIN_WHOLE)}(?:.*\.)?(?:{of_layers})"] if of_layers else []
    return "|".join([*patterns, HEAD] if HEAD in targets else patterns)


@dataclass(frozen=True)
class _Wrapped:
    """A parameter of experts that has adapters.  holds: places in ``stack.holds`` of those that have."""

    stack: Stack
    holds: tuple[int, ...]


def _wrapped(table: AdapterTable) -> list[_Wrapped]:
    adapted = {module for each in table.adapted.values() for module in each.modules}
    wrapped = []
    for stack in expert_parameters(table.base.family):
        holds = tuple(place for place, tensor in enumerate(stack.holds) if module_of(tensor) in adapted)
        if holds:
            wrapped.append(_Wrapped(stack, holds))
    return wrapped


def target_fields(table: AdapterTable) -> dict[str, Any]:
    """The fields of ``adapter_config.json`` that say which layers of a model with experts are adapted, and their ranks.

    PEFT takes ``gate_proj`` in ``target_modules`` for the experts' alone, so that layers of dense MLPs and shared
    experts with such names are parameters here.
    """
    lora = table.lora
    wrapped = _wrapped(table)
    of_experts = {tensor.name for stack in expert_parameters(table.base.family) for tensor in stack.holds}
    taken = {name.removesuffix(".weight").rpartition(".")[2] for name in of_experts}
    modules = []
    parameters = [_within_layer(each.stack.name) for each in wrapped]
    for adapted in table.adapted.values():
        for module in adapted.modules:
            if f"{module}.weight" in of_experts:
                continue
            within = _within_layer(module)
            if within.rpartition(".")[2] in taken:
                parameters.append(f"{within}.weight")
            else:
                modules.append(within)
    ranks = {_pattern(each.stack): len(each.holds) * lora.rank for each in wrapped if len(each.holds) > 1}
    alphas = {pattern: replace(lora, rank=rank, alpha=1.0).scale for pattern, rank in ranks.items()}
    return {
        "target_modules": modules,
        "exclude_modules": None,
        "target_parameters": parameters or None,
        "rank_pattern": ranks,
        "alpha_pattern": {pattern: lora.scale / scale for pattern, scale in alphas.items()},
    }


def _within_layer(name: str) -> str:
    return name.removeprefix(HF_LAYER)


def _pattern(stack: Stack) -> str:
    return re.escape(_within_layer(stack.name))


def peft_tensors(tensors: Mapping[str, Tensor], table: AdapterTable) -> dict[str, Tensor]:
    """Whole adapters by PEFT's names for transformers 5, of ``tensors``, whole and by the names of ``table``."""
    made = dict(tensors)
    wrapped = _wrapped(table)
    model = table.model
    for layer in filter(model.has_experts, range(model.num_layers)) if wrapped else ():
        for number, each in enumerate(wrapped):
            halves = {which: list[Tensor]() for which in "AB"}
            assert model.moe is not None
            for expert in range(model.moe.num_experts):
                names = {which: _names(each, layer, expert, which) for which in "AB"}
                halves["A"].append(torch.cat([made.pop(name) for name in names["A"]]))
                halves["B"].append(_joined([made.pop(name) for name in names["B"]], each))
            parameter = each.stack.name.format(l=layer).rpartition(".")[0]
            module = parameter + ".base_layer" * (len(wrapped) - 1 - number)
            made[adapter_name(module, "A")] = torch.cat(halves["A"])
            made[adapter_name(module, "B")] = torch.stack(halves["B"], dim=2).flatten(1)
    return made


def _names(wrapped: _Wrapped, layer: int, expert: int, which: str) -> list[str]:
    holds = (module_of(wrapped.stack.holds[place]) for place in wrapped.holds)
    return [adapter_name(module.format(l=layer, e=expert), which) for module in holds]


def _joined(halves: Sequence[Tensor], wrapped: _Wrapped) -> Tensor:
    """B of one expert, block diagonal, with zeros for what has no adapters."""
    (outputs, rank), dtype = halves[0].shape, halves[0].dtype
    joined = torch.zeros(len(wrapped.stack.holds) * outputs, len(halves) * rank, dtype=dtype)
    for number, (place, half) in enumerate(zip(wrapped.holds, halves, strict=True)):
        rows = StackedPart(wrapped.stack, "", 0, place, outputs).outputs(0, outputs)
        joined[rows.start : rows.stop : rows.step, number * rank : (number + 1) * rank] = half
    return joined
