"""Rules of what a run is: asynchronous, with agents, distilled from teachers, or on conversations."""

from __future__ import annotations

import math

from mcore_rl.config.agent import CutSide
from mcore_rl.from_verl.answer import Answer
from mcore_rl.from_verl.row import within
from mcore_rl.from_verl.written import ASYNC, SYNC, Verl

BATCH = "data.train_batch_size"
MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"
STALENESS, SYNC_STEP, BATCHES, PARTIAL = within(
    "async_training", "staleness_threshold trigger_parameter_sync_step require_batches partial_rollout"
)
ROLLOUT = "actor_rollout_ref.rollout"
SEPARATE = "separate_async"
LOOPS = ("tool_agent", "single_turn_agent")  # verl's, which are here
DISTILLATION = "distillation"
TEACHING = f"{DISTILLATION}.distillation_loss"
MODELS = f"{DISTILLATION}.teacher_models"
ONLY = "teacher_model"  # verl's name of the only teacher, which it drops where others are named
TEACHER = f"{MODELS}.{ONLY}.model_path"
KEY = f"{DISTILLATION}.teacher_key"
SAMPLED = ("k1", "kl")  # verl's names of log p_policy - log p_teacher
OF_LARGEST = ("forward_kl_topk", "reverse_kl_topk", "jsd_topk")  # over some tokens of the vocabulary


def asynchrony(verl: Verl, answer: Answer) -> None:
    """Devices of the engines' own, and how far drawing is ahead of training."""
    late = "trainer.v1.trainer_mode"
    group = "rollout"
    if verl.mode == SYNC:
        if verl[late] not in (None, "sync", SEPARATE):
            answer.absent(late, "engines and trainer would work on the same devices at once")
        if verl[late] != SEPARATE:
            return
        group = ROLLOUT
        most = "trainer.v1.sampler.max_off_policy_threshold"
        answer.set("async.max_staleness", verl[most], most, late)
    nodes, devices = within(group, "nnodes n_gpus_per_node")
    tp = f"{ROLLOUT}.tensor_model_parallel_size"
    answer.set("trainer.mode", ASYNC if verl.mode == SYNC else verl.mode, nodes, devices, STALENESS, late)
    answer.set("trainer.placement", "separate", nodes, devices)
    engines = int(verl[nodes] or 1) * int(verl[devices] or 1) // int(verl[tp] or 1)
    answer.set("rollout.dp", max(1, engines), nodes, devices, tp)
    if verl.mode != ASYNC:
        return
    batch = int(verl[MINI]) * int(verl[BATCHES]) * int(verl[SYNC_STEP])
    answer.set(BATCH, batch, BATCH, MINI, BATCHES, SYNC_STEP)
    text = "a step is what verl trains between two updates of the engines' weights"
    answer.changed(SYNC_STEP, text, f"{BATCH}={batch}")
    stale = math.ceil(float(verl[STALENESS]))
    answer.set("async.max_staleness", stale, STALENESS)
    text = "versions of the weights, and the most of any sample; verl's is a share of samples that may be older"
    answer.changed(STALENESS, text, f"async.max_staleness={stale}")
    answer.set("async.partial_rollout", bool(verl[PARTIAL]), PARTIAL)
    total = "rollout.total_rollout_steps"
    answer.set("trainer.total_training_steps", max(1, int(verl[total]) // batch), total)


def agents(verl: Verl, answer: Answer) -> None:
    """The loop of an episode, its tools and its limits."""
    turns, loop = within(ROLLOUT, "multi_turn agent.default_agent_loop")
    switch, most, users, code = within(turns, "enable max_assistant_turns max_user_turns function_tool_path")
    name = str(verl[loop] or LOOPS[1])
    if verl[switch] and name == LOOPS[1]:
        name = LOOPS[0]
    if name not in LOOPS:
        answer.absent(loop, f"write rollout.agent.loops.{name}=FILE.py:CLASS (docs/agents.md)")
    elif name == LOOPS[0]:
        answer.set("rollout.agent.default_agent_loop", name, loop, switch)
    if name == LOOPS[1]:
        return
    for name in ("tool_config_path", "interaction_config_path", "format", "max_tool_response_length"):
        key = f"{turns}.{name}"
        if verl[key] not in (None, ""):
            answer.set(f"rollout.agent.{'tool_parser' if name == 'format' else name}", verl[key], key)
    side = f"{turns}.tool_response_truncate_side"
    if verl[side] in {each.value for each in CutSide}:
        answer.set("rollout.agent.tool_response_cut", verl[side], side)
    answered = int(verl[users]) + 1 if verl[users] else None  # each of the user's turns follows one of the model's
    limits = [int(each) for each in (verl[most], answered) if each]
    if limits:
        answer.set("rollout.agent.max_turns", min(limits), most, users)
    if verl[code]:
        answer.absent(code, "write rollout.agent.tools=[FILE.py:FUNCTION,...] with its functions")


def conversation(verl: Verl, answer: Answer) -> None:
    """The column of whole conversations, or those of a prompt and its response."""
    several, early, late = within("data", "multiturn.enable multiturn.messages_key messages_key")
    key = late if late in verl.keys else early
    if late in verl.keys or verl[several]:
        answer.set("data.messages_key", verl[key], key, several)
        return
    for name in ("prompt_key", "response_key"):
        nested = f"data.{name.removesuffix('key')}dict_keys"
        if verl[nested]:
            answer.absent(nested, "a column has a text: write the rows anew, or as messages")
        answer.set(f"data.{name}", verl[f"data.{name}"], f"data.{name}")


def fine_tuning_batches(verl: Verl, answer: Answer) -> None:
    """One budget of tokens, of verl's packed batches or of its micro batches of the longest rows."""
    dynamic, budget, micro, longest = within(
        "data", "use_dynamic_bsz max_token_len_per_gpu micro_batch_size_per_gpu max_length"
    )
    cp = int(verl["engine.context_parallel_size"] or 1) if verl.is_megatron else 1
    cp = max(cp, *(int(verl[f"{each}ulysses_sequence_parallel_size"] or 1) for each in ("engine.", "")))
    if verl[dynamic] and verl[budget]:
        answer.set("actor.microbatch_tokens", int(verl[budget]) * cp, dynamic, budget)
        answer.dropped(micro, "not read in verl either, with use_dynamic_bsz=True")
    elif verl[micro]:
        answer.set("actor.microbatch_tokens", int(verl[micro]) * int(verl[longest]), micro, longest)


def distillation(verl: Verl, answer: Answer) -> None:
    """Teachers whose log-ratio is part of the advantages; verl's coefficient counts beside task rewards alone."""
    switch = f"{DISTILLATION}.enabled"
    mode, gradient, rewards, coef = within(
        TEACHING, "loss_mode use_policy_gradient use_task_rewards distillation_loss_coef"
    )
    if not verl[switch]:
        return
    name = str(verl[mode])
    if name not in SAMPLED or not verl[gradient]:
        text = f"loss_mode={name} as a loss of its own, of drawn tokens, is not here"
        if name in OF_LARGEST:
            text = f"loss_mode={name} is over the topk largest log-probs, and algorithm.distill.divergence over all"
        elif name not in SAMPLED:
            text = f"loss_mode={name} is not here: of a drawn token the teacher's part is k1"
        answer.absent(switch, f"{text}. Write loss_mode=k1 and use_policy_gradient=True")
        return
    _teachers(verl, answer, switch)
    answer.set("algorithm.distill.coef", verl[coef] if verl[rewards] else 1.0, coef, rewards, switch)
    if not verl[rewards]:
        answer.set("algorithm.adv_estimator", "none", rewards, switch)


def _teachers(verl: Verl, answer: Answer, switch: str) -> None:
    """The one teacher, or several by data source; where others are named verl drops ``ONLY``."""
    written = [key for key in verl.written if key.startswith(f"{MODELS}.")]
    names = list(dict.fromkeys(key.removeprefix(f"{MODELS}.").partition(".")[0] for key in written))
    others = [name for name in names if name != ONLY]
    if len(others) < 2:  # the only one teaches every row, whatever its key
        path = f"{MODELS}.{others[0]}.model_path" if others else TEACHER
        answer.set("teacher.path", verl[path], path, switch)
        return
    sources = [f"{MODELS}.{name}.{each}" for name in others for each in ("key", "model_path")]
    named = {verl[f"{MODELS}.{name}.key"]: verl[f"{MODELS}.{name}.model_path"] for name in others}
    if verl[KEY] != "data_source":
        answer.absent(KEY, "a row's teacher is that of its data_source")
    if None in named or None in named.values() or len(named) < len(others):
        answer.absent(switch, f"each of {MODELS} needs a key of its own and a model_path")
        return
    answer.set("teacher.by_source", {str(source): path for source, path in named.items()}, *sources, KEY, switch)
