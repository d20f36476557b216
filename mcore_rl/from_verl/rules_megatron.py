"""Rules of Megatron's engine, for each trained role: chunks, experts, recompute, layers of stages, single fields."""

from __future__ import annotations

from mcore_rl.config.engine import Dispatcher
from mcore_rl.config.megatron_fields import ALLOWED, REFUSED, TAKEN, megatron_violations
from mcore_rl.from_verl.answer import Answer, Difference
from mcore_rl.from_verl.row import within
from mcore_rl.from_verl.table import row_for
from mcore_rl.from_verl.written import Verl

DECIDED = ("recompute", "pipeline", "dispatcher", "balance")  # rules of fields of their own
HARMLESS = (
    "layers that the engine does not use",
    "Megatron's router",
    "replaced by the checkpoint's",
    "inference",
    "deprecated",
    "tests or tools",
)


def chunks(verl: Verl, answer: Answer, role: str) -> None:
    """Chunks of a pipeline stage, which one stage has not."""
    base = verl.places[role].megatron
    key, pp = within(base, "virtual_pipeline_model_parallel_size pipeline_model_parallel_size")
    if verl[key] and int(verl[pp] or 1) > 1:
        answer.set(f"{role}.parallel.vpp", verl[key], key)
    else:
        text = "one pipeline stage has no chunks" if verl[key] else "one chunk, the default"
        answer.dropped(key, text)


def experts(verl: Verl, answer: Answer, role: str) -> None:
    """Tensor parallelism inside an expert; null is Megatron's tensor_model_parallel_size."""
    base = verl.places[role].megatron
    key, ep = within(base, "expert_tensor_parallel_size expert_model_parallel_size")
    if verl[key] not in (None, "None"):
        answer.set(f"{role}.parallel.etp", verl[key], key)
    elif (verl[ep] or 1) > 1 or answer.model.is_mixture:
        answer.set(f"{role}.parallel.etp", verl[f"{base}.tensor_model_parallel_size"] or 1, key, ep)


def recompute(verl: Verl, answer: Answer, role: str) -> None:
    """What is computed again in the backward pass."""
    places = verl.places[role]
    fields = f"{places.megatron}.override_transformer_config"
    switch, early = within(
        places.model,
        "enable_gradient_checkpointing gradient_checkpointing_kwargs.activations_checkpoint_granularity",
    )
    granularity, modules = within(fields, "recompute_granularity recompute_modules")
    if not verl.is_megatron:
        answer.set(f"{role}.recompute", "full" if verl[switch] else "none", switch)
        return
    key = early if verl[switch] and verl[early] else granularity
    wanted = str(verl[key])
    answer.set(f"{role}.recompute", wanted if wanted in ("selective", "full") else "none", key)
    if wanted == "selective" and verl[modules] not in (None, ["core_attn"]):
        answer.absent(modules, "core attention alone is recomputed")


def pipeline(verl: Verl, answer: Answer, role: str) -> None:
    """Layers of every chunk, from the numbers of the first and the last stage."""
    base = verl.places[role].megatron
    fields = f"{base}.override_transformer_config"
    first, last, embeds, heads = keys = within(
        fields,
        "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage "
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
    )
    ours = f"{role}.parallel.pipeline_layers"
    answer.absent(f"{fields}.pipeline_model_parallel_layout", f"write {ours}")
    sizes = within(base, "pipeline_model_parallel_size virtual_pipeline_model_parallel_size")
    pp, vpp = (int(verl[key] or 1) for key in sizes)
    asked = [key for key in keys if verl[key]]
    if not asked or pp == 1:
        for key in keys:
            answer.dropped(key, "every stage has as many layers")
        return
    layers = stages(answer.model.num_layers, pp, verl[first], verl[last], bool(verl[embeds]), bool(verl[heads]))
    if layers is None or any(each % vpp for each in layers):
        count = answer.model.num_layers
        what = "the model is not known" if count is None else f"{count} layers do not divide so"
        for key in asked:
            answer.absent(key, f"{what}: write {ours}, {pp * vpp} numbers", ours)
        return
    answer.set(ours, [each // vpp for _ in range(vpp) for each in layers], *asked)


def stages(
    layers: int | None, pp: int, first: int | None, last: int | None, embeds: bool, heads: bool
) -> list[int] | None:
    """The layers of each stage as Megatron divides them (transformer_block.py, 0.16.1); None if they do not divide.

    embeds, heads: whether the embedding and the head count as a layer of their stages.
    """
    if layers is None:
        return None
    if first is not None or last is not None:
        begin = [] if first is None else [int(first)]
        end = [] if last is None else [int(last)]
        rest = layers - sum(begin) - sum(end)
        middle = pp - len(begin) - len(end)
        return None if middle <= 0 or rest % middle else [*begin, *[rest // middle] * middle, *end]
    if (layers + embeds + heads) % pp:
        return None
    even = [(layers + embeds + heads) // pp] * pp
    even[0] -= embeds
    even[-1] -= heads
    return even


def dispatcher(verl: Verl, answer: Answer, role: str) -> None:
    """How tokens are sent to experts."""
    fields = f"{verl.places[role].megatron}.override_transformer_config"
    kind, deepep, backend = within(fields, "moe_token_dispatcher_type moe_enable_deepep moe_flex_dispatcher_backend")
    names = {each.value: each.value for each in Dispatcher} | {"alltoall_seq": "alltoall"}
    wanted = str(verl[kind])
    if wanted in names:
        answer.set(f"{role}.moe.dispatcher", names[wanted], kind, *([deepep] if wanted == "flex" else []))
    elif verl[kind] is not None:
        answer.absent(kind, f"there are {', '.join(names)}")
    if wanted == "flex" and verl[backend]:
        answer.set(f"{role}.moe.flex_backend", verl[backend], backend)
    if wanted != "flex" and verl[deepep]:
        answer.dropped(deepep, "read with moe_token_dispatcher_type=flex alone")


def balance(verl: Verl, answer: Answer, role: str) -> None:
    """The load of the experts."""
    fields = f"{verl.places[role].megatron}.override_transformer_config"
    coeff, kind = within(fields, "moe_aux_loss_coeff moe_router_load_balancing_type")
    if verl[coeff] and verl[kind] not in ("none", "sinkhorn"):
        answer.set(f"{role}.moe.aux_loss", "sequence" if verl[kind] == "seq_aux_loss" else "batch", coeff, kind)
        answer.set(f"{role}.moe.aux_loss_coeff", verl[coeff], coeff, kind)


def transformer_field(verl: Verl, answer: Answer, role: str) -> None:
    """Each field of Megatron's TransformerConfig that no other row is about."""
    prefix = f"{verl.places[role].megatron}.override_transformer_config."
    for key in [each for each in verl.written if each.startswith(prefix)]:
        row = row_for(key, verl.program)
        name = key.removeprefix(prefix)
        value = verl.written[key]
        if row is None or row.rule in DECIDED or not row.rule:
            continue
        taken = next((ours for ours, fields in TAKEN.items() if name in fields), "")
        refused = next((why for why, fields in REFUSED.items() if name in fields), "")
        if name in ("gradient_accumulation_fusion", "tp_comm_overlap") and (name == "tp_comm_overlap") == bool(value):
            answer.set(f"{role}.{name}", value, key)
        elif taken:
            said = "the model's config.json says it" if taken == "config.json" else f"follows from {role}.{taken}"
            answer.dropped(key, said)
        elif name in ALLOWED and not megatron_violations({name: value}):
            answer.add(f"{role}.megatron", [name], value, key)
        elif refused:
            harmless = not value or any(each in refused for each in HARMLESS)
            answer.tell(Difference.dropped if harmless else Difference.absent, key, f"it {refused}")
        else:
            answer.absent(key, megatron_violations({name: value})[0].problem)
