"""What the gate runs: every axis by itself, their products, and what must not matter inside each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mcore_rl.config.algorithm import CorrectionLevel, Divergence
from mcore_rl.config.engine import AuxLoss, Dispatcher, Recompute
from mcore_rl.config.preference import PreferenceLoss
from mcore_rl.config.reward_training import RewardLoss
from mcore_rl.config.role import Head
from tests.invariance.problems import WHOLE, Case, Problem
from tests.support.picture_models import ALONE

DENSE, MOE = Problem(model="dense", temperature=0.7), Problem(model="moe")
SEQUENCE_AUX = Problem(model="moe", aux=AuxLoss.sequence, z=1e-2)
BATCH_AUX = Problem(model="moe", aux=AuxLoss.batch)
REPLAY = Problem(model="moe", replay=True)
REPLAY_BATCH_AUX = Problem(model="moe", aux=AuxLoss.batch, replay=True)
GEMMA2 = Problem(model="gemma2", temperature=0.7)
QWEN2_MOE = Problem(model="qwen2_moe")
ONE_KEY_HEAD = Problem(model="one_key_head")
DEEPSEEK = Problem(model="deepseek_v3", aux=AuxLoss.sequence, z=1e-2)
REPLAY_DEEPSEEK = replace(DEEPSEEK, replay=True)
DEEPSEEK_V2 = Problem(model="deepseek_v2", aux=AuxLoss.sequence)
GLM4_MOE = Problem(model="glm4_moe")
QWEN3_NEXT = Problem(model="qwen3_next")
CRITIC = Problem(model="tied", head=Head.value)
PROMPTED = Problem(model="dense", temperature=0.7, prompted=True)
TWO_OR_THREE = 2 * ALONE  # tokens of a microbatch, of sequences with pictures


def _variations(case: Case) -> list[Case]:
    """A layout with many microbatches, with one, unpacked, and recomputed."""
    return [
        case,
        replace(case, microbatch_tokens=WHOLE),
        replace(case, microbatch_tokens=None, microbatch_sequences=4, recompute=Recompute.full),
        replace(case, microbatch_tokens=None, microbatch_sequences=1),
        replace(case, recompute=Recompute.full),
    ]


def _expert_cases() -> list[Case]:
    """Balance losses, dispatchers, and experts split in other ways than the rest."""
    cases: list[Case] = []
    for problem in (SEQUENCE_AUX, BATCH_AUX):
        for layout, world_size in (("", 2), ("tp=2,etp=1", 2), ("pp=2", 2), ("cp=2", 2), ("ep=2", 2), ("cp=2,ep=2", 4)):
            case = Case(problem=problem, layout=layout, world_size=world_size)
            cases += [case, replace(case, microbatch_tokens=WHOLE, recompute=Recompute.full)]
    for layout in ("ep=2", "tp=2,ep=2,etp=1"):
        case = Case(problem=MOE, layout=layout, world_size=2, dispatcher=Dispatcher.allgather)
        cases += [case, replace(case, microbatch_tokens=None, microbatch_sequences=3)]
    for dispatcher in (Dispatcher.allgather, Dispatcher.alltoall):  # experts split where the rest is not
        cases.append(Case(problem=MOE, layout="etp=2", world_size=2, dispatcher=dispatcher))
    cases.append(Case(problem=MOE, layout="cp=2,ep=2", world_size=4, dispatcher=Dispatcher.allgather))
    return cases


def _attention_cases() -> list[Case]:
    """Windows, soft caps, norms behind the blocks and rotary frequencies, where a layout could lose them."""
    cases: list[Case] = []
    for layout, world_size in (("", 1), ("tp=2", 2), ("cp=2", 2), ("pp=2,vpp=2", 2)):
        case = Case(problem=GEMMA2, layout=layout, world_size=world_size)
        cases += [case, replace(case, microbatch_tokens=None, microbatch_sequences=4, recompute=Recompute.full)]
    cases.append(Case(problem=GEMMA2, layout="pp=2", world_size=2, pipeline_layers=(3, 1)))
    cases.append(Case(problem=GEMMA2, layout="tp=2,cp=2", world_size=4))
    cases.append(Case(problem=GEMMA2, layout="tp=2,pp=2", world_size=4, recompute=Recompute.selective))
    windowed = Case(problem=Problem(model="windowed"))
    cases += [replace(windowed, layout="cp=4", world_size=4), replace(windowed, layout="cp=2", world_size=2)]
    cases.append(replace(windowed, microbatch_tokens=None, microbatch_sequences=3))
    cases.append(Case(problem=Problem(model="rope_yarn"), layout="cp=2", world_size=2))
    return cases


def _mixed_layer_cases() -> list[Case]:
    """Dense layers beside layers with experts, shared experts and latent attention.

    Of the four layers of DEEPSEEK the first two are dense: with pp=2 the first stage has no router and no expert.
    """
    cases: list[Case] = []
    for layout, world_size in (
        ("tp=2,etp=1", 2),
        ("pp=2", 2),
        ("cp=2", 2),
        ("ep=2", 2),
        ("tp=2,cp=2,ep=2,etp=2", 4),
        ("pp=2,vpp=2,tp=2,ep=2,etp=1", 4),
    ):
        cases.append(Case(problem=DEEPSEEK, layout=layout, world_size=world_size))
    for layout in ("tp=2,etp=1", "cp=2"):
        case = Case(problem=DEEPSEEK, layout=layout, world_size=2, recompute=Recompute.full)
        cases.append(replace(case, microbatch_tokens=None, microbatch_sequences=3))
    for counts in ((3, 1), (1, 3)):
        cases.append(Case(problem=DEEPSEEK, layout="pp=2", world_size=2, pipeline_layers=counts))
    yarn = Problem(model="deepseek_v3_yarn", replay=True)
    cases.append(Case(problem=yarn, layout="tp=2,etp=2", world_size=2, recompute=Recompute.selective))
    cases.append(Case(problem=yarn, layout="pp=2,cp=2", world_size=4, recompute=Recompute.full))
    for layout, world_size in (("tp=2,etp=1", 2), ("pp=2", 2), ("cp=2", 2), ("pp=2,tp=2,etp=2", 4), ("ep=4", 4)):
        cases.append(Case(problem=QWEN2_MOE, layout=layout, world_size=world_size))
    for layout, world_size in (("tp=2,etp=1", 2), ("pp=2", 2), ("cp=2", 2), ("tp=4,ep=2,etp=2", 4), ("pp=2,ep=2", 4)):
        cases.append(Case(problem=GLM4_MOE, layout=layout, world_size=world_size))
    for layout, world_size in (("tp=2,etp=1", 2), ("ep=2", 2), ("cp=2", 2), ("pp=2,tp=2,etp=2", 4)):
        cases.append(Case(problem=DEEPSEEK_V2, layout=layout, world_size=world_size))
    cases += _linear_attention_cases()
    for problem, layout in ((DEEPSEEK, "ep=2"), (QWEN2_MOE, "tp=2,ep=2,etp=1")):
        cases.append(Case(problem=problem, layout=layout, world_size=2, dispatcher=Dispatcher.allgather))
    return cases


def _linear_attention_cases() -> list[Case]:
    """Layers whose state goes from token to token, beside gated attention, of whose key heads there are two."""
    cases = [
        Case(problem=QWEN3_NEXT, layout=layout, world_size=world_size)
        for layout, world_size in (
            ("tp=2,etp=1", 2), ("pp=2", 2), ("ep=2", 2), ("cp=2", 2), ("tp=4,ep=2,etp=2", 4), ("tp=2,cp=2,ep=2", 4),
            ("pp=2,vpp=2,tp=2,ep=2,etp=1", 4),
        )
    ]  # fmt: skip
    flat = {
        "qwen3_5": (("tp=2", 2), ("cp=2", 2), ("pp=2", 2), ("pp=2,vpp=2", 2), ("tp=2,cp=2", 4)),
        "qwen3_5_moe": (("tp=2,etp=1", 2), ("ep=2", 2), ("pp=2,vpp=2,tp=2,ep=2,etp=1", 4)),
    }
    for name, of_model in flat.items():
        cases += [Case(problem=Problem(model=name), layout=layout, world_size=size) for layout, size in of_model]
    cases.append(replace(cases[-1], recompute=Recompute.full))
    hybrid = Case(problem=Problem(model="qwen3_5"), layout="cp=2", world_size=2, recompute=Recompute.selective)
    cases.append(replace(hybrid, microbatch_tokens=None, microbatch_sequences=3))
    unpacked = replace(cases[3], microbatch_tokens=None, microbatch_sequences=3, recompute=Recompute.selective)
    return [*cases, unpacked, replace(cases[0], recompute=Recompute.full), replace(cases[5], microbatch_tokens=WHOLE)]


def _shared_key_head_cases() -> list[Case]:
    """More tensor ranks than key/value heads: several ranks take one key head, and none has all of its rows."""
    cases = [
        Case(problem=ONE_KEY_HEAD, layout=layout, world_size=world_size)
        for layout, world_size in (("tp=2", 2), ("tp=4", 4), ("tp=2,cp=2", 4), ("tp=2,pp=2,vpp=2", 4))
    ]
    cases.append(replace(cases[1], microbatch_tokens=None, microbatch_sequences=3, recompute=Recompute.full))
    cases.append(Case(problem=GEMMA2, layout="tp=4", world_size=4))
    cases.append(Case(problem=Problem(model="qwen_moe"), layout="tp=4,ep=2,etp=2", world_size=4))
    cases.append(Case(problem=DENSE, layout="tp=4", world_size=8, recompute=Recompute.selective))
    return cases


QUICK_ADAPTERS = {
    ("dense", "tp=2"), ("dense", "pp=2"), ("moe", "tp=2,etp=2"), ("moe", "ep=2"), ("deepseek_v3", "tp=2,etp=1"),
    ("one_key_head", "tp=2"), ("gemma2", "tp=2"),
}  # fmt: skip


def _adapter_cases() -> list[Case]:
    """Adapters on every linear: dense, with experts, with latent attention, and where ranks hold parts of heads."""
    layouts = {
        "dense": (("tp=2", 2), ("pp=2", 2), ("pp=2,vpp=2", 2), ("cp=2", 2), ("", 2), ("tp=2,pp=2", 4), ("tp=2", 4),
                  ("tp=2,cp=2", 4)),
        "moe": (("tp=2,etp=1", 2), ("tp=2,etp=2", 2), ("etp=2", 2), ("ep=2", 2), ("cp=2", 2), ("ep=2,tp=2,etp=1", 4),
                ("ep=2,tp=2,etp=2", 4), ("ep=2,etp=2", 4), ("tp=2,pp=2,ep=2,etp=1", 4)),
        "deepseek_v3": (("tp=2,etp=1", 2), ("tp=2,etp=2", 2), ("pp=2", 2), ("ep=2", 2), ("cp=2", 2),
                        ("tp=2,cp=2,ep=2,etp=2", 4), ("pp=2,vpp=2,tp=2,ep=2,etp=1", 4)),
        "one_key_head": (("tp=2", 2), ("tp=4", 4)), "gemma2": (("tp=2", 2),), "qwen3_next": (("tp=2,etp=1", 2),),
        "phi3": (("tp=2", 2),), "gpt_oss": (("tp=2,etp=1", 2),), "tied": (("pp=2", 2),),
    }  # fmt: skip
    cases: list[Case] = []
    for name, of_model in layouts.items():
        problem = Problem(model=name, lora=True)
        cases += [Case(problem=problem, layout=layout, world_size=size) for layout, size in of_model]
    for name, layout in (("dense", "tp=2"), ("moe", "tp=2,etp=2"), ("deepseek_v3", "tp=2,etp=1")):
        case = Case(problem=Problem(model=name, lora=True), layout=layout, world_size=2, recompute=Recompute.full)
        cases += [case, replace(case, microbatch_tokens=None, microbatch_sequences=3)]
        cases.append(replace(case, layout=layout, overlap=True, recompute=Recompute.none))
    ends = Problem(model="dense", lora=True, adapts=("q_proj", "lm_head"))
    cases += [Case(problem=ends, layout=layout, world_size=size) for layout, size in (("tp=2", 2), ("tp=4", 4))]
    cases += [Case(problem=ends, layout=layout, world_size=2) for layout in ("pp=2", "cp=2")]
    critic = Problem(model="tied", head=Head.value, lora=True)
    cases += [Case(problem=critic, layout=layout, world_size=2) for layout in ("tp=2", "pp=2")]
    return cases


def _overlap_cases() -> list[Case]:
    """Gradients that are reduced during the backward pass, and what is passed on to Megatron by name."""
    cases = [
        Case(problem=problem, layout=layout, world_size=world_size, overlap=True)
        for problem, layout, world_size in (
            (DENSE, "", 2), (DENSE, "cp=2", 2), (Problem(model="tied"), "pp=2", 4), (MOE, "ep=2", 2),
            (DENSE, "pp=2,vpp=2", 4), (MOE, "tp=2,ep=2,etp=1", 4), (DEEPSEEK, "pp=2", 4), (CRITIC, "", 2),
        )
    ]  # fmt: skip
    filled = [("tp=2", 2), ("cp=2", 2), ("tp=2,pp=2", 4)]
    cases += [Case(problem=DENSE, layout=layout, world_size=size, filled=True) for layout, size in filled]
    cases.append(Case(problem=MOE, layout="ep=2", world_size=2, filled=True))
    cases.append(replace(cases[0], microbatch_tokens=None, microbatch_sequences=3, recompute=Recompute.full))
    released = (("deallocate_pipeline_outputs", True),)
    cases.append(Case(problem=DENSE, layout="pp=2", world_size=2, megatron=released))
    cases.append(Case(problem=DENSE, layout="pp=2,vpp=2", world_size=2, megatron=released))
    cases.append(Case(problem=DENSE, layout="tp=2", world_size=2, megatron=(("bias_dropout_fusion", True),)))
    cases.append(Case(problem=QWEN2_MOE, layout="ep=2", world_size=2, megatron=(("moe_shared_expert_overlap", True),)))
    return cases


def _replay_cases() -> list[Case]:
    """Experts that are dictated to most tokens: packed, and unpacked with the whole layer recomputed."""
    cases: list[Case] = []
    for layout, world_size in (
        ("", 2), ("tp=2,etp=1", 2), ("tp=2,etp=2", 2), ("pp=2", 2), ("pp=2,vpp=2", 2), ("cp=2", 2), ("ep=2", 2),
        ("tp=2,cp=2,ep=2,etp=2", 4), ("pp=2,vpp=2,tp=2,ep=2,etp=1", 4),
    ):  # fmt: skip
        packed = Case(problem=REPLAY, layout=layout, world_size=world_size)
        unpacked = replace(packed, microbatch_tokens=None, microbatch_sequences=3, recompute=Recompute.full)
        cases += [packed, unpacked, replace(packed, recompute=Recompute.full)]
    for layout, world_size in (("tp=2,etp=1", 2), ("pp=2", 2), ("cp=2", 2), ("pp=2,tp=2,ep=2,etp=1", 4)):
        cases.append(Case(problem=REPLAY_DEEPSEEK, layout=layout, world_size=world_size))
    cases.append(Case(problem=REPLAY, layout="ep=2", world_size=2, dispatcher=Dispatcher.allgather))
    cases.append(Case(problem=REPLAY_BATCH_AUX, layout="tp=2,etp=1", world_size=2, recompute=Recompute.full))
    return cases


def _feature_cases() -> list[Case]:
    """What one family alone has: norms over all heads, rotations of a part of a head, two rotary bases, sinks."""
    layouts = dict.fromkeys(("phi3", "gemma3", "smollm3", "ernie4_5"), ("tp=2", "cp=2", "pp=2"))
    layouts["seed_oss"] = ("tp=2", "pp=2")
    layouts |= dict.fromkeys(("olmoe", "minimax_m2", "glm4_moe_lite"), ("tp=2,etp=1", "ep=2", "cp=2"))
    cases = [
        Case(problem=Problem(model=name), layout=layout, world_size=2) for name in layouts for layout in layouts[name]
    ]
    sinks = Case(problem=Problem(model="gpt_oss"))
    for layout, world_size in (("tp=2,etp=1", 2), ("ep=2", 2), ("cp=2", 2), ("tp=2,pp=2,ep=2,etp=1", 4)):
        cases.append(replace(sinks, layout=layout, world_size=world_size))
    # Beyond the key/value heads, and with the attention alone recomputed, of which the sinks are a part.
    cases.append(replace(sinks, layout="tp=4,ep=2", world_size=4, recompute=Recompute.selective))
    cases.append(replace(sinks, microbatch_tokens=None, microbatch_sequences=3, recompute=Recompute.full))
    return cases


def _weighed_cases() -> list[Case]:
    """Weights of whole responses, of which a context rank has a part."""
    weighed = Problem(model="dense", weighed=CorrectionLevel.sequence)
    layouts = (("", 2), ("cp=2", 2), ("cp=2,pp=2", 4))
    cases = [Case(problem=weighed, layout=layout, world_size=size) for layout, size in layouts]
    return [*cases, Case(problem=replace(weighed, weighed=CorrectionLevel.geometric), layout="cp=2", world_size=4)]


QUICK_PREFERENCES = {
    ("dense", "", "dpo"), ("dense", "cp=2", "dpo"), ("dense", "pp=2,vpp=2", "dpo"), ("dense", "tp=2,cp=2", "dpo"),
    ("moe", "ep=2", "dpo"), ("dense", "cp=2", "kto"),
}  # fmt: skip


def _preference_cases() -> list[Case]:
    """Losses of whole pairs: of each a context rank has a part, and no layout may part a pair."""
    dpo = Problem(model="dense", preference=PreferenceLoss.dpo)
    moe = replace(dpo, model="moe")
    layouts = (("", 1), ("", 2), ("tp=2", 2), ("pp=2", 2), ("pp=2,vpp=2", 2), ("cp=2", 2), ("tp=2,cp=2", 4),
               ("cp=2,pp=2", 4), ("cp=2", 4))  # fmt: skip
    cases = [Case(problem=dpo, layout=layout, world_size=size) for layout, size in layouts]
    cases += [replace(cases[5], microbatch_tokens=None, microbatch_sequences=3, recompute=Recompute.full)]
    cases += [replace(cases[5], microbatch_tokens=WHOLE), replace(cases[1], overlap=True)]
    cases += [
        Case(problem=moe, layout=layout, world_size=size)
        for layout, size in (("ep=2", 2), ("tp=2,etp=1", 2), ("cp=2,ep=2", 4), ("tp=2,pp=2,ep=2,etp=1", 4))
    ]
    for loss in (PreferenceLoss.ipo, PreferenceLoss.simpo, PreferenceLoss.orpo, PreferenceLoss.kto):
        problem = Problem(model="dense", preference=loss)
        cases += [Case(problem=problem, layout=layout, world_size=2) for layout in ("", "cp=2")]
    adapted = replace(dpo, lora=True)
    return [*cases, Case(problem=adapted, layout="cp=2", world_size=2)]


QUICK_SCORES = {
    ("tied", "", "bradley_terry"), ("tied", "cp=2", "bradley_terry"), ("tied", "tp=2,cp=2", "bradley_terry"),
    ("tied", "cp=2", "bce"), ("moe", "pp=2,ep=2", "bradley_terry"),
}  # fmt: skip


def _score_cases() -> list[Case]:
    """Losses of scores, each of which one context rank alone has."""
    pairs = Problem(model="tied", head=Head.value, scores=RewardLoss.bradley_terry)
    layouts = (("", 1), ("", 2), ("tp=2", 2), ("pp=2", 2), ("pp=2,vpp=2", 2), ("cp=2", 2), ("tp=2,cp=2", 4),
               ("cp=2,pp=2", 4), ("cp=2", 4))  # fmt: skip
    cases = [Case(problem=pairs, layout=layout, world_size=size) for layout, size in layouts]
    cases += [replace(cases[5], microbatch_tokens=None, microbatch_sequences=3, recompute=Recompute.full)]
    cases += [replace(cases[5], microbatch_tokens=WHOLE), replace(cases[1], overlap=True)]
    moe = replace(pairs, model="moe")
    for layout, size in (("ep=2", 2), ("tp=2,etp=1", 2), ("cp=2,ep=2", 4), ("pp=2,ep=2", 4)):
        cases.append(Case(problem=moe, layout=layout, world_size=size))
    for loss in (RewardLoss.regression, RewardLoss.bce):
        labels = replace(pairs, scores=loss)
        cases += [Case(problem=labels, layout=layout, world_size=2) for layout in ("", "cp=2")]
    steps = Problem(model="tied", head=Head.value, scores=RewardLoss.bce, steps=True)
    for layout, size in (("", 2), ("tp=2", 2), ("pp=2", 2), ("cp=2", 2), ("tp=2,cp=2", 4)):
        cases.append(Case(problem=steps, layout=layout, world_size=size))
    cases.append(replace(cases[-2], microbatch_tokens=None, microbatch_sequences=3))
    cases.append(Case(problem=replace(steps, model="moe"), layout="ep=2", world_size=2))
    return [*cases, Case(problem=replace(pairs, lora=True), layout="cp=2", world_size=2)]


def _outcome_cases() -> list[Case]:
    """The loss of a process reward model: of whole responses, of which a context rank has a part."""
    dense = Problem(model="dense", outcomes=True)
    layouts = (("", 2), ("tp=2", 2), ("pp=2", 2), ("cp=2", 2), ("tp=2,cp=2", 4), ("cp=2,pp=2", 4), ("cp=4", 4))
    cases = [Case(problem=dense, layout=layout, world_size=size) for layout, size in layouts]
    cases += [replace(cases[3], microbatch_tokens=None, microbatch_sequences=3, recompute=Recompute.full)]
    moe = replace(dense, model="moe")
    cases += [Case(problem=moe, layout=layout, world_size=size) for layout, size in (("ep=2", 2), ("cp=2,ep=2", 4))]
    return [*cases, Case(problem=replace(dense, lora=True), layout="cp=2", world_size=2)]


def _distillation_cases() -> list[Case]:
    """Divergences from a teacher: sums over the vocabulary, which tensor ranks split."""
    dense = Problem(model="dense", temperature=0.7, distill=Divergence.jensen_shannon)
    layouts = (("", 2), ("tp=2", 2), ("pp=2", 2), ("cp=2", 2), ("tp=4", 4), ("tp=2,cp=2", 4), ("tp=2,pp=2", 4))
    cases = [Case(problem=dense, layout=layout, world_size=size) for layout, size in layouts]
    cases += [replace(cases[1], microbatch_tokens=None, microbatch_sequences=3, recompute=Recompute.full)]
    for kind in (Divergence.forward_kl, Divergence.reverse_kl):
        cases += [
            Case(problem=replace(dense, distill=kind), layout=layout, world_size=2) for layout in ("tp=2", "cp=2")
        ]
    capped = replace(dense, model="gemma2", distill=Divergence.forward_kl)
    return [*cases, Case(problem=capped, layout="tp=2", world_size=2),
            Case(problem=replace(dense, lora=True), layout="tp=2", world_size=2)]  # fmt: skip


def _muon_cases() -> list[Case]:
    """Matrices that are made orthogonal, of which data, tensor and expert ranks have parts."""
    layouts = {
        "dense": (("", 2), ("tp=2", 2), ("pp=2,vpp=2", 2), ("cp=2", 2), ("tp=2,cp=2", 4), ("tp=4", 4)),
        "moe": (("tp=2,etp=1", 2), ("tp=2,etp=2", 2), ("etp=2", 2), ("ep=2", 2), ("tp=2,pp=2,ep=2,etp=1", 4)),
        "one_key_head": (("tp=4", 4),),
        "deepseek_v3": (("tp=2,etp=1", 2), ("pp=2,vpp=2,tp=2,ep=2,etp=1", 4)),
        "qwen3_next": (("tp=2,etp=1", 2),),
        "tied": (("pp=2", 2),),
    }
    cases = [
        Case(problem=Problem(model=name, muon=True), layout=layout, world_size=size)
        for name, of_model in layouts.items()
        for layout, size in of_model
    ]
    return [*cases, replace(cases[0], overlap=True)]


def _shared_cases() -> list[Case]:
    """Prompts that are computed once for their samples, beside one sequence at a time."""
    dense = Case(problem=PROMPTED, shared=True)
    moe = replace(dense, problem=replace(SEQUENCE_AUX, prompted=True))
    cases = [dense, replace(dense, microbatch_tokens=WHOLE), replace(dense, recompute=Recompute.full)]
    for layout, size in (("", 2), ("tp=2", 2), ("pp=2", 2), ("pp=2,vpp=2", 2), ("tp=2,pp=2", 4), ("tp=2,pp=2", 8)):
        cases.append(replace(dense, layout=layout, world_size=size))
    for layout, size in (("", 1), ("tp=2,etp=1", 2), ("pp=2", 2), ("ep=2", 2), ("tp=2,pp=2,ep=2,etp=1", 4)):
        cases.append(replace(moe, layout=layout, world_size=size))
    cases.append(replace(moe, layout="ep=2", world_size=2, dispatcher=Dispatcher.allgather))
    cases.append(replace(moe, layout="tp=2,pp=2", world_size=4, recompute=Recompute.full, microbatch_tokens=WHOLE))
    for problem, layout, size, recompute in (
        (BATCH_AUX, "tp=2,etp=1", 2, Recompute.full),
        (REPLAY, "tp=2,etp=1", 2, Recompute.none),
        (REPLAY_BATCH_AUX, "pp=2", 2, Recompute.full),
        (DEEPSEEK, "tp=2,etp=1", 2, Recompute.selective),
        (GEMMA2, "tp=2", 2, Recompute.selective),
        (Problem(model="windowed"), "", 1, Recompute.none),
        (Problem(model="gpt_oss"), "tp=2,etp=1", 2, Recompute.none),
        (Problem(model="gemma3"), "pp=2", 2, Recompute.none),
        (ONE_KEY_HEAD, "tp=2", 2, Recompute.selective),
        (CRITIC, "tp=2", 2, Recompute.none),
        (Problem(model="dense", lora=True), "tp=2", 2, Recompute.none),
        (Problem(model="dense", distill=Divergence.forward_kl), "tp=2", 2, Recompute.none),
    ):
        problem = replace(problem, prompted=True)
        cases.append(Case(problem=problem, layout=layout, world_size=size, recompute=recompute, shared=True))
    return cases


QUICK_PICTURES = {
    ("qwen2_5_vl", "", 2), ("qwen2_5_vl", "cp=2", 2), ("qwen2_5_vl", "tp=2", 2), ("qwen3_vl", "pp=2", 2),
    ("qwen3_vl_moe", "tp=2,ep=2,etp=1", 2),
}  # fmt: skip


def _picture_cases() -> list[Case]:
    """Towers and positions of three axes: pictures are packed, and on all axes; the second of two data ranks has none.

    With ``pp=2,vpp=2`` a chunk has one layer, and the deepstack of Qwen3-VL wants two.
    """
    layouts = {
        "qwen2_5_vl": (("", 2), ("tp=2", 2), ("cp=2", 2), ("pp=2", 2), ("pp=2,vpp=2", 2), ("tp=2,cp=2", 4),
                       ("cp=4", 4), ("tp=2", 4), ("pp=2,vpp=2,cp=2", 4), ("pp=2", 4)),
        "qwen3_vl": (("tp=2", 2), ("cp=2", 2), ("pp=2", 2), ("", 2), ("tp=2,cp=2", 4), ("tp=2,pp=2", 4)),
        "qwen3_vl_moe": (("tp=2,ep=2,etp=1", 2), ("ep=2", 2), ("cp=2,ep=2", 4), ("tp=2,pp=2,ep=2,etp=1", 4)),
    }  # fmt: skip
    cases: list[Case] = []
    for name, of_model in layouts.items():
        problem = Problem(model=name, temperature=0.7)
        for layout, size in of_model:
            case = Case(problem=problem, layout=layout, world_size=size, microbatch_tokens=TWO_OR_THREE)
            cases += [case, replace(case, recompute=Recompute.full)]
        cases.append(Case(problem=problem, microbatch_tokens=WHOLE))
        frozen = replace(problem, frozen_tower=True)
        for layout, size in of_model[:3]:
            case = Case(problem=frozen, layout=layout, world_size=size, microbatch_tokens=TWO_OR_THREE)
            cases.append(replace(case, recompute=Recompute.full))
    overlapped = replace(cases[0], overlap=True)
    uneven = Case(problem=Problem(model="qwen3_vl"), layout="pp=2", world_size=2, pipeline_layers=(3, 1))
    return [*cases, overlapped, replace(uneven, microbatch_tokens=TWO_OR_THREE)]


def all_cases() -> list[Case]:
    """Every case of the gate, without duplicates."""
    cases: list[Case] = []
    for problem in (DENSE, MOE):
        cases += _variations(Case(problem=problem))[1:]
        axes = ["", "tp=2", "pp=2", "pp=2,vpp=2", "cp=2"]
        axes += ["ep=2", "ep=2,cp=2", "ep=2,etp=1,tp=2", "etp=2,tp=2"] if problem is MOE else []
        for layout in axes:
            cases += _variations(Case(problem=problem, layout=layout, world_size=2))
    moe_products = [
        "ep=2,tp=2,etp=1",
        "ep=2,tp=2,etp=2",
        "cp=2,ep=2",
        "pp=2,ep=2",
        "ep=4",
        "ep=2",
        "pp=2,vpp=2,ep=2",
        "pp=2,tp=2,etp=2",
    ]
    dense_products = [
        "tp=2,pp=2",
        "tp=2,cp=2",
        "tp=2",
        "cp=2",
        "pp=2",
        "pp=2,cp=2",
        "pp=2,vpp=2,tp=2",
        "cp=4",
        "pp=4",
        "pp=2,vpp=2,cp=2",
    ]
    for layout in [*moe_products, "tp=2,pp=2,ep=2,etp=1"]:
        case = Case(problem=MOE, layout=layout, world_size=4)
        cases += [case, replace(case, microbatch_tokens=WHOLE, recompute=Recompute.full)]
    for layout in dense_products:
        case = Case(problem=DENSE, layout=layout, world_size=4)
        cases += [case, replace(case, microbatch_tokens=None, microbatch_sequences=2, recompute=Recompute.selective)]
    for layout in ("tp=2,pp=2,cp=2", "tp=2,cp=2", "pp=4,vpp=1,tp=2"):
        cases.append(Case(problem=DENSE, layout=layout, world_size=8))
    for layout in ("tp=2,pp=2,ep=2,etp=1", "cp=2,pp=2,ep=4", "tp=2,cp=2,ep=4,etp=1"):
        cases.append(Case(problem=MOE, layout=layout, world_size=8))
    cases += _distillation_cases()
    cases += _expert_cases()
    cases += _mixed_layer_cases()
    cases += _attention_cases()
    cases += _shared_key_head_cases()
    cases += _overlap_cases()
    cases += _feature_cases()
    cases += _adapter_cases()
    cases += _weighed_cases()
    cases += [*_preference_cases(), *_score_cases(), *_outcome_cases(), *_muon_cases()]
    for layout, world_size in (("tp=2", 2), ("pp=2", 2), ("cp=2", 2), ("pp=2,tp=2", 4)):
        cases.append(Case(problem=CRITIC, layout=layout, world_size=world_size))
        cases.append(Case(problem=Problem(model="tied"), layout=layout, world_size=world_size))
    for layout in ("tp=2", "cp=2"):
        cases.append(Case(problem=Problem(model="qk_norm"), layout=layout, world_size=2))
        cases.append(Case(problem=Problem(model="qwen_moe"), layout=layout, world_size=2))
    cases.append(Case(problem=DENSE, layout="pp=2", world_size=2, pipeline_layers=(3, 1)))
    cases.append(Case(problem=MOE, layout="pp=2,vpp=2", world_size=2, pipeline_layers=(1, 1, 1, 1)))
    cases += _replay_cases()
    cases += _shared_cases()
    cases += _picture_cases()
    return list(dict.fromkeys(cases))


def each_layout_once(cases: list[Case]) -> list[Case]:
    """The cases of the tier ``ci``: each layout of a problem once; of the plain problems on two also unpacked.

    Of overlaps and filled microbatches, two processes say enough there; what is passed on is of the tier ``full``.
    """
    first: dict[tuple[object, ...], Case] = {}
    for case in cases:
        if case.problem.lora and (case.problem.model, case.layout) not in QUICK_ADAPTERS:
            continue
        preference = case.problem.preference
        if preference is not None and (case.problem.model, case.layout, preference.value) not in QUICK_PREFERENCES:
            continue
        scores = case.problem.scores
        if scores is not None and (case.problem.model, case.layout, scores.value) not in QUICK_SCORES:
            continue
        if case.problem.pictured and (case.problem.model, case.layout, case.world_size) not in QUICK_PICTURES:
            continue
        if case.megatron or ((case.overlap or case.filled) and case.world_size > 2):
            continue
        also_unpacked = case.problem in (DENSE, MOE) and case.world_size <= 2
        packed = case.microbatch_sequences is None or not also_unpacked
        same = (case.problem, case.layout, case.world_size, case.dispatcher, case.pipeline_layers)
        way = (*same, case.overlap, case.filled, packed)
        first.setdefault(way, case)
    return list(first.values())


def few_of(cases: Iterable[Case]) -> list[Case]:
    """The cases of the tier ``test``: packed, on two and four processes, four kinds of models; and two mistakes."""
    plain = [
        case
        for case in cases
        if case.problem in FEW_PROBLEMS
        and case == Case(problem=case.problem, layout=case.layout, world_size=case.world_size)
        and case.world_size in (2, 4)
        and (case.world_size, case.layout) not in TOLD_BY_TWO
    ]
    return [*plain, *(case for case in SABOTAGED if case.sabotage in FEW_MISTAKES)]


FEW_PROBLEMS = (DENSE, MOE, DEEPSEEK, Problem(model="dense", lora=True), Problem(model="moe", lora=True))
TOLD_BY_TWO = {(4, layout) for layout in ("tp=2", "cp=2", "pp=2", "ep=2")}  # the same axis with two data ranks
FEW_MISTAKES = ("attention_across_borders", "shifted_expert")


def single_process(problem: Problem) -> Case:
    """The reference: one process, one sequence or pair at a time, no packing, no recompute.

    Sequences with pictures are never unpacked: their budget is one into which no two fit.
    """
    if problem.pictured:
        return Case(problem=problem, microbatch_tokens=ALONE)
    return Case(problem=problem, microbatch_tokens=None, microbatch_sequences=2 if problem.paired else 1)


SABOTAGED = [
    Case(problem=DENSE, layout="tp=2", world_size=2, sabotage="unsummed_norms"),
    Case(problem=DENSE, layout="", world_size=2, sabotage="averaged_over_data_ranks"),
    Case(problem=DENSE, layout="", world_size=2, sabotage="mean_of_microbatches"),
    Case(problem=DENSE, layout="cp=2", world_size=2, sabotage="attention_across_borders"),
    Case(
        problem=Problem(model="dense", preference=PreferenceLoss.dpo),
        layout="cp=2",
        world_size=2,
        sabotage="parts_of_responses",
    ),
    Case(problem=Problem(model="dense", outcomes=True), layout="cp=2", world_size=2, sabotage="parts_of_responses"),
    Case(problem=MOE, layout="ep=2", world_size=2, sabotage="shifted_expert"),
    Case(problem=MOE, layout="tp=2,etp=1", world_size=2, sabotage="experts_reduced_as_dense"),
    Case(problem=REPLAY, layout="tp=2,etp=1", world_size=2, sabotage="replayed_a_row_late"),
    Case(problem=REPLAY, layout="pp=2", world_size=2, recompute=Recompute.full, sabotage="recomputed_freely"),
    Case(problem=DEEPSEEK, layout="tp=2,etp=1", world_size=2, sabotage="unsummed_replicas"),
    Case(problem=ONE_KEY_HEAD, layout="tp=2", world_size=2, sabotage="unsummed_key_heads"),
    Case(problem=Problem(model="dense", muon=True), layout="tp=2", world_size=2, sabotage="orthogonal_parts"),
    Case(problem=PROMPTED, layout="tp=2", world_size=2, shared=True, sabotage="answers_see_answers"),
    Case(problem=PROMPTED, layout="pp=2", world_size=2, shared=True, sabotage="answers_begin_at_0"),
    Case(
        problem=replace(BATCH_AUX, prompted=True),
        layout="tp=2,etp=1",
        world_size=2,
        shared=True,
        sabotage="prompts_counted_once",
    ),
    *(
        Case(
            problem=Problem(model=model, temperature=0.7),
            layout=layout,
            world_size=2,
            microbatch_tokens=TWO_OR_THREE,
            sabotage=sabotage,
        )
        for model, layout, sabotage in (
            ("qwen2_5_vl", "tp=2", "unsummed_towers"),
            ("qwen3_vl", "pp=2", "features_of_neighbours"),
            ("qwen2_5_vl", "cp=2", "positions_of_text"),
        )
    ),
]
