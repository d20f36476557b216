"""What an engine asks Megatron for on a platform that says cuda: no kernel runs here, settings reach their places."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from megatron.core.tensor_parallel import layers as parallel_linears
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe import fused_a2a, moe_utils
from torch import Tensor

from mcore_rl.config.engine import (
    Device,
    Dispatcher,
    FlexBackend,
    LayerSpec,
    MoeTrainConfig,
    OptimizerConfig,
    Precision,
)
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.parallel import parse_layout
from mcore_rl.ground.types import LossInputs, LossSums
from mcore_rl.parallel import weight_gradient
from mcore_rl.parallel.groups import ProcessGroups
from mcore_rl.parallel.launch import Rank
from mcore_rl.parallel.layout import Layout
from mcore_rl.training import engine as engine_module
from mcore_rl.training import fusions as fusions_module
from mcore_rl.training.fusions import PERMUTE_KERNELS, UNFUSED, Fusions, resolve_fusions, share_buffers
from mcore_rl.training.model import transformer_config
from tests.support import batches, engines, models
from tests.support.forked import run_ranks
from tests.support.full_weights import Weights

CUDA = replace(engines.CPU, kind=Device.cuda)
DENSE, MOE = models.dense(), models.moe()
TE, LOCAL = LayerSpec.transformer_engine, LayerSpec.local


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apex, Transformer Engine's permutation, DeepEP and HybridEP, as Megatron sees them where they are installed."""
    monkeypatch.setattr(parallel_linears, "_grad_accum_fusion_available", True)
    monkeypatch.setattr(fused_a2a, "HAVE_DEEP_EP", True)
    monkeypatch.setattr(fused_a2a, "HAVE_HYBRIDEP", True)
    for name in PERMUTE_KERNELS:
        monkeypatch.setattr(moe_utils, name, object(), raising=False)


def resolved(
    model: ModelConfig = MOE, platform: Any = CUDA, spec: LayerSpec = TE, layout: str = "ep=2", **settings: Any
) -> tuple[Fusions, dict[str, str]]:
    """What is used, and what is refused: key -> problem."""
    config = engines.config(**settings)
    fusions, violations = resolve_fusions(config, model, Layout.of(parse_layout(layout), 2), platform, spec)
    return fusions, {each.key: f"{each.problem}. {each.remedy}" for each in violations}


@pytest.mark.usefixtures("everything")
def test_an_accelerator_with_everything_uses_everything() -> None:
    every = Fusions(overlap_grad_reduce=True, gradient_accumulation_fusion=True, permute_fusion=True)
    assert resolved() == (every, {})
    assert resolved(DENSE) == (replace(every, permute_fusion=False), {})
    assert resolved(spec=LOCAL) == (replace(every, permute_fusion=False), {})
    assert resolved(spec=LOCAL, moe=MoeTrainConfig(permute_fusion=True)) == (every, {})
    off: dict[str, Any] = dict(overlap_grad_reduce=False, gradient_accumulation_fusion=False)
    assert resolved(moe=MoeTrainConfig(permute_fusion=False), **off) == (UNFUSED, {})


def test_without_them_none_is_used_and_asking_is_refused() -> None:
    bare = Fusions(overlap_grad_reduce=True)
    assert resolved() == (bare, {})
    _, said = resolved(
        gradient_accumulation_fusion=True, moe=MoeTrainConfig(permute_fusion=True, dispatcher=Dispatcher.flex)
    )
    assert said.keys() == {"gradient_accumulation_fusion", "moe.permute_fusion", "moe.flex_backend"}
    assert "NVIDIA Apex is not installed" in said["gradient_accumulation_fusion"]
    assert "Transformer Engine 2.1" in said["moe.permute_fusion"] and "deep_ep" in said["moe.flex_backend"]


def test_torchs_own_product_adds_up_where_apex_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusions_module, "adds_up", lambda device_type: device_type == engines.CPU.device_type)
    bare = Fusions(overlap_grad_reduce=True, gradient_accumulation_fusion=True)
    assert resolved() == (bare, {})
    assert resolved(gradient_accumulation_fusion=False)[0] == Fusions(overlap_grad_reduce=True)
    assert resolved(platform=engines.CPU, spec=LOCAL) == (UNFUSED, {})


@pytest.mark.usefixtures("everything")
def test_what_is_for_accelerators_is_refused_on_the_cpu() -> None:
    _, said = resolved(
        platform=engines.CPU, spec=LOCAL, gradient_accumulation_fusion=True,
        moe=MoeTrainConfig(permute_fusion=True, dispatcher=Dispatcher.flex),
    )  # fmt: skip
    assert said.keys() == {"gradient_accumulation_fusion", "moe.permute_fusion", "moe.dispatcher"}
    assert resolved(platform=engines.CPU, spec=LOCAL) == (UNFUSED, {})


@pytest.mark.usefixtures("everything")
def test_the_flex_dispatcher_needs_ranks_to_send_to() -> None:
    for backend in FlexBackend:
        flex = MoeTrainConfig(dispatcher=Dispatcher.flex, flex_backend=backend)
        assert not resolved(moe=flex)[1] and not resolved(layout="tp=2,etp=2", moe=flex)[1]
        assert "parallel.ep and parallel.etp are 1" in resolved(layout="", moe=flex)[1]["moe.dispatcher"]
        assert not resolved(DENSE, layout="", moe=flex)[1], "a model without experts sends no tokens"


def test_overlapped_tensor_communication_is_refused_where_it_would_do_nothing() -> None:
    asked: dict[str, Any] = dict(layout="tp=2", tp_comm_overlap=True)
    used, said = resolved(DENSE, **asked)
    assert used.tp_comm_overlap and not said
    assert not resolved(DENSE, layout="tp=2")[0].tp_comm_overlap
    for changes, problem in (
        (dict(spec=LOCAL), "Transformer Engine's layers do it"),
        (dict(layout=""), "nothing to communicate"),
        (dict(model=models.deepseek_v3()), "latent attention"),
        (dict(microbatch_tokens=None, microbatch_sequences=1), "one shape"),
    ):
        given: dict[str, Any] = {"model": DENSE} | asked | changes
        assert problem in resolved(**given)[1]["tp_comm_overlap"]


@pytest.mark.parametrize("is_new", [True, False])
def test_buffers_are_made_for_a_full_microbatch(is_new: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Megatron's own initialize.py calls ``initialize_ub`` of Transformer Engine, since 2.7 and before."""
    called: list[dict[str, Any]] = []
    base = ModuleType("transformer_engine.pytorch.module.base")
    base.initialize_ub = lambda **given: called.append(given)  # type: ignore[attr-defined]
    if is_new:
        base.UserBufferQuantizationMode = SimpleNamespace(NONE="none")  # type: ignore[attr-defined]
    module = ModuleType("transformer_engine.pytorch.module")
    module.base = base  # type: ignore[attr-defined]
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, base.__name__, base)
    share_buffers(4096, DENSE, Layout.of(parse_layout("tp=2"), 2), replace(CUDA, backend="its own"))
    precision = {"quantization_modes": ["none"]} if is_new else {"use_fp8": False}
    (given,) = called
    shape = [4096, DENSE.hidden_size]
    assert given == {"shape": shape, "tp_size": 2, "ub_cfgs": {}, "bootstrap_backend": "its own"} | precision


@pytest.mark.usefixtures("everything")
def test_megatron_s_configuration_has_them() -> None:
    flex = MoeTrainConfig(dispatcher=Dispatcher.flex, flex_backend=FlexBackend.hybridep)
    fields = {"moe_hybridep_num_sms": 24, "attention_backend": "flash", "deallocate_pipeline_outputs": True}
    settings, parallel = engines.config(moe=flex, megatron=fields), parse_layout("ep=2")
    made = transformer_config(MOE, parallel, settings, LOCAL, resolved()[0])
    assert made.gradient_accumulation_fusion and made.moe_permute_fusion and not made.tp_comm_overlap
    assert transformer_config(
        DENSE, parse_layout("tp=2"), settings, LOCAL, Fusions(tp_comm_overlap=True)
    ).tp_comm_overlap
    assert (made.moe_token_dispatcher_type, made.moe_flex_dispatcher_backend) == ("flex", "hybridep")
    assert made.moe_hybridep_num_sms == 24 and made.deallocate_pipeline_outputs
    assert made.attention_backend is AttnBackend.flash
    plain = transformer_config(MOE, parallel, engines.config(), LOCAL)
    assert not plain.gradient_accumulation_fusion and not plain.moe_permute_fusion
    assert plain.moe_token_dispatcher_type == "alltoall" and not plain.deallocate_pipeline_outputs


def accumulated(groups: ProcessGroups, model: ModelConfig, precision: Precision, *, fused: bool) -> list[Tensor]:
    """The gradient buffers after a step of several microbatches, as the optimizer was given them."""
    seen: list[Tensor] = []
    real = engine_module.resolve_fusions
    engine_module.resolve_fusions = lambda *_: (Fusions(gradient_accumulation_fusion=fused), [])
    try:
        engine = engines.build(groups, model, engines.config(microbatch_tokens=32, precision=precision))
    finally:
        engine_module.resolve_fusions = real
    assert engine.models[0].config.gradient_accumulation_fusion is fused
    assert engine.optimizer is not None
    step = engine.optimizer.step

    def stepping(**given: Any) -> Any:
        seen.extend(each.grad_data.clone() for chunk in engine.chunks for each in chunk.buffers)
        return step(**given)

    engine.optimizer.step = stepping  # type: ignore[method-assign]
    whole = batches.ragged(model.vocab_size, (29, 30, 18, 23, 28, 31))
    engine.train_step(whole, batches.policy_loss, batches.denominators(whole), with_entropy=True)
    return seen


def fused_and_not(rank: Rank) -> dict[str, tuple[list[Tensor], list[Tensor], int]]:
    """For each case: gradients added by products, and apart; and how many products added."""
    seen, calls = {}, 0
    real = weight_gradient.wgrad_gemm_accum_fp32

    def counted(*given: Tensor) -> None:
        nonlocal calls
        calls += 1
        real(*given)

    weight_gradient.wgrad_gemm_accum_fp32 = counted
    with engines.world(rank), engines.groups_of() as groups:
        for name, model in (("dense", DENSE), ("tied", models.dense(tie_output=True)), ("experts", MOE)):
            for precision in Precision:
                apart, before = accumulated(groups, model, precision, fused=False), calls
                fused = accumulated(groups, model, precision, fused=True)
                seen[f"{name}, {precision.value}"] = fused, apart, calls - before
    return seen


def test_gradients_that_products_add_up_are_the_same(processes: None) -> None:
    """Over several microbatches, also of a weight that is embedding and output: float32 adds in another order, and
    without the fusion bfloat16 gradients are rounded before they are added.
    """
    for case, (fused, apart, calls) in run_ranks(fused_and_not, 1, (), timeout_s=240)[0].items():
        layers, linears = DENSE.num_layers, 2 if case.startswith("experts") else 4
        assert calls % (layers * linears + 1) == 0 < calls, f"{case}: every linear and the output, each microbatch"
        for ours, theirs in zip(fused, apart, strict=True):
            bound = 1e-5 if "float32" in case else 1e-2
            assert float((ours - theirs).norm()) <= bound * float(theirs.norm()) > 0, case


def overlapping(rank: Rank) -> list[tuple[bool, int | None, bool, str]]:
    """Of engines: whether gradients are reduced meanwhile, the size of buckets, cut or not, and the pause's kind."""
    seen = []
    with engines.world(rank):
        for layout, wanted in (("", None), ("", False), ("pp=2,vpp=2", True)):
            with engines.groups_of(layout) as groups:
                settings = engines.config(overlap_grad_reduce=wanted)
                engine = engines.build(groups, DENSE, settings, layout=layout, platform=CUDA)
                ddp, quiet = engine.chunks[0].ddp_config, engine.models[0].config.no_sync_func
                sizes = [chunk.bucket_size is not None for chunk in engine.chunks]
                seen.append((ddp.overlap_grad_reduce, ddp.bucket_size, sizes, type(quiet).__name__))
                del engine
    return seen


def trained(groups: ProcessGroups, model: ModelConfig, layout: str, *, overlap: bool) -> tuple[Weights, int]:
    """The weights after steps of one, several and fewer microbatches, and how many reductions began in a backward pass.

    Megatron counts the gradients of the first step, and reduces during the backward passes of later ones.
    """
    engine_module.BUCKET_ELEMENTS = 2000  # several of a tiny model
    optim = OptimizerConfig(lr=1e-2, eps=1e-5, clip_grad=0.0)  # a norm over other shards is rounded in another way
    settings = engines.config(overlap_grad_reduce=overlap, microbatch_tokens=32, optim=optim)
    engine, begun = engines.build(groups, model, settings, layout=layout), 0
    bucket_groups = [each for chunk in engine.chunks for each in chunk.bucket_groups]
    for lengths in ((5, 4), (29, 30, 18, 23, 28, 31), (3, 2), (30, 28, 9, 31)):
        whole = batches.ragged(model.vocab_size, lengths)
        share = engines.share_of(whole, groups)

        def loss(inputs: LossInputs) -> LossSums:
            nonlocal begun
            begun += sum(each.grad_reduce_handle is not None for each in bucket_groups)
            return batches.policy_loss(inputs)

        def finished(*_: object) -> None:
            nonlocal begun
            begun += sum(each.grad_reduce_handle is not None for each in bucket_groups)

        handle = engine.models[0].embedding.register_full_backward_hook(finished)
        engine.train_step(share, loss, batches.denominators(whole), with_entropy=True)
        handle.remove()
    return engines.weights_of(engine), begun


def both_ways(rank: Rank) -> dict[str, tuple[bool, int, int]]:
    """For each layout: whether weights are equal bit for bit, and the reductions that began early, with and without."""
    seen = {}
    with engines.world(rank):
        for model, layout in ((DENSE, ""), (MOE, "ep=2"), (models.dense(tie_output=True), "tp=2")):
            with engines.groups_of(layout) as groups:
                ours, early = trained(groups, model, layout, overlap=True)
                theirs, never = trained(groups, model, layout, overlap=False)
            seen[layout] = engines.same_bits(ours, theirs), early, never
    return seen


def test_steps_of_any_number_of_microbatches_sum_the_same_gradients(processes: None) -> None:
    for seen in run_ranks(both_ways, 2, (), timeout_s=120):
        for layout, (same, early, never) in seen.items():
            assert same, layout
            assert early > 0 == never, layout


def test_gradients_are_reduced_meanwhile_on_an_accelerator(processes: None) -> None:
    first, last = run_ranks(overlapping, 2, ())
    assert first == [
        (True, 40_000_000, [True], "method"),
        (False, None, [False], "NoneType"),
        (True, 40_000_000, [True, False], "list"),
    ]
    assert last[2][2] == [False, False], "a later stage's gradients are ready before the first one's"
