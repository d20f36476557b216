"""Rules of what a run is: asynchronous, with agents, or on conversations."""

from __future__ import annotations

import math

from mcore_rl.config.agent import CutSide
from mcore_rl.from_verl.answer import Answer, Difference
from mcore_rl.from_verl.programs import ASYNC, SYNC
from mcore_rl.from_verl.written import Verl

BATCH, MINI = "data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"
STALENESS, SYNC_STEP, BATCHES, PARTIAL = (
    f"async_training.{name}"
    for name in ("staleness_threshold", "trigger_parameter_sync_step", "require_batches", "partial_rollout")
)
ROLLOUT = "actor_rollout_ref.rollout"
SEPARATE = "separate_async"
LOOPS = ("tool_agent", "single_turn_agent")  # verl's, which are here


def asynchrony(verl: Verl, answer: Answer) -> None:
    """Devices of the engines' own, and how far drawing is ahead of training."""
    late, group = "trainer.v1.trainer_mode", "rollout"
    if verl.mode == SYNC:
        if verl[late] not in (None, "sync", SEPARATE):
            answer.tell(Difference.absent, late, "engines and trainer would work on the same devices at once")
        if verl[late] != SEPARATE:
            return
        group = ROLLOUT
        most = "trainer.v1.sampler.max_off_policy_threshold"
        answer.set("async.max_staleness", verl[most], most, late)
    nodes, devices, tp = f"{group}.nnodes", f"{group}.n_gpus_per_node", f"{ROLLOUT}.tensor_model_parallel_size"
    answer.set("trainer.mode", ASYNC if verl.mode == SYNC else verl.mode, nodes, devices, STALENESS, late)
    answer.set("trainer.placement", "separate", nodes, devices)
    engines = int(verl[nodes] or 1) * int(verl[devices] or 1) // int(verl[tp] or 1)
    answer.set("rollout.dp", max(1, engines), nodes, devices, tp)
    if verl.mode != ASYNC:
        return
    batch = int(verl[MINI]) * int(verl[BATCHES]) * int(verl[SYNC_STEP])
    answer.set(BATCH, batch, BATCH, MINI, BATCHES, SYNC_STEP)
    text = "a step is what verl trains between two updates of the engines' weights"
    answer.tell(Difference.changed, SYNC_STEP, text, f"{BATCH}={batch}")
    stale = math.ceil(float(verl[STALENESS]))
    answer.set("async.max_staleness", stale, STALENESS)
    text = "versions of the weights, and the most of any sample; verl's is a share of samples that may be older"
    answer.tell(Difference.changed, STALENESS, text, f"async.max_staleness={stale}")
    answer.set("async.partial_rollout", bool(verl[PARTIAL]), PARTIAL)
    total = "rollout.total_rollout_steps"
    answer.set("trainer.total_training_steps", max(1, int(verl[total]) // batch), total)


def agents(verl: Verl, answer: Answer) -> None:
    """The loop of an episode, its tools and its limits."""
    turns, loop = f"{ROLLOUT}.multi_turn", f"{ROLLOUT}.agent.default_agent_loop"
    switch, most, users, tools, code = (
        f"{turns}.{name}"
        for name in ("enable", "max_assistant_turns", "max_user_turns", "tool_config_path", "function_tool_path")
    )
    name = str(verl[loop] or LOOPS[1])
    if verl[switch] and name == LOOPS[1]:
        name = LOOPS[0]
    if name not in LOOPS:
        answer.tell(Difference.absent, loop, f"write rollout.agent.loops.{name}=FILE.py:CLASS (docs/agents.md)")
    elif name == LOOPS[0]:
        answer.set("rollout.agent.default_agent_loop", name, loop, switch)
    if name == LOOPS[1]:
        return
    for key, ours in (
        (tools, "tool_config_path"),
        (f"{turns}.interaction_config_path", "interaction_config_path"),
        (f"{turns}.format", "tool_parser"),
        (f"{turns}.max_tool_response_length", "max_tool_response_length"),
    ):
        if verl[key] not in (None, ""):
            answer.set(f"rollout.agent.{ours}", verl[key], key)
    side = f"{turns}.tool_response_truncate_side"
    if verl[side] in {each.value for each in CutSide}:
        answer.set("rollout.agent.tool_response_cut", verl[side], side)
    answered = int(verl[users]) + 1 if verl[users] else None  # each of the user's turns follows one of the model's
    limits = [int(each) for each in (verl[most], answered) if each]
    if limits:
        answer.set("rollout.agent.max_turns", min(limits), most, users)
    if verl[code]:
        answer.tell(Difference.absent, code, "write rollout.agent.tools=[FILE.py:FUNCTION,...] with its functions")


def conversation(verl: Verl, answer: Answer) -> None:
    """The column of whole conversations, or those of a prompt and its response."""
    several, early, late = "data.multiturn.enable", "data.multiturn.messages_key", "data.messages_key"
    key = late if late in verl.keys else early
    if late in verl.keys or verl[several]:
        answer.set("data.messages_key", verl[key], key, several)
        return
    for name in ("prompt_key", "response_key"):
        nested = f"data.{name.removesuffix('key')}dict_keys"
        if verl[nested]:
            answer.tell(Difference.absent, nested, "a column has a text: write the rows anew, or as messages")
        answer.set(f"data.{name}", verl[f"data.{name}"], f"data.{name}")


def fine_tuning_batches(verl: Verl, answer: Answer) -> None:
    """One budget of tokens, of verl's packed batches or of its micro batches of the longest rows."""
    dynamic, budget, micro, longest = (
        f"data.{name}"
        for name in ("use_dynamic_bsz", "max_token_len_per_gpu", "micro_batch_size_per_gpu", "max_length")
    )
    cp = int(verl["engine.context_parallel_size"] or 1) if verl.is_megatron else 1
    cp = max(cp, *(int(verl[f"{each}ulysses_sequence_parallel_size"] or 1) for each in ("engine.", "")))
    if verl[dynamic] and verl[budget]:
        answer.set("actor.microbatch_tokens", int(verl[budget]) * cp, dynamic, budget)
        answer.tell(Difference.dropped, micro, "not read in verl either, with use_dynamic_bsz=True")
    elif verl[micro]:
        answer.set("actor.microbatch_tokens", int(verl[micro]) * int(verl[longest]), micro, longest)
