"""The engine on the accelerator against transformers on the CPU in float32: log-probs, entropies, loss, gradients.

float32, local layers: 1e-4 relative.  TensorFloat-32 is off, so products are rounded as on the CPU; but sums are cut
into tiles and joined in another order, and exponentials are approximated to a few units, in every layer, forward and
backward.  On the CPU the same comparison stays at 1e-6.

bfloat16, local and Transformer Engine's layers: the reference starts from the same weights, rounded to bfloat16, so
what differs are activations, rounded to 8 bits (4e-3) some ten times a layer.  On the CPU log-probs were seen to differ
by 5e-3 in the mean and 2e-2 at most, gradients by 2.3e-2; the bounds are about three times that, since accelerators
round at other places.  Experts are dictated, those that float32 chooses: rounding alone would send some elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from mcore_rl.config.engine import Device, LayerSpec, OptimizerConfig, Precision
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.parallel.device import Platform, detect, device_of, have_transformer_engine, set_device
from mcore_rl.parallel.groups import destroy_groups, init_groups
from mcore_rl.parallel.launch import Rank, run_ranks
from mcore_rl.parallel.layout import Layout
from mcore_rl.training.attention_kernels import attend_one_by_one, attend_varlen, varlen_can_run
from mcore_rl.training.capped_attention import attend_capped
from mcore_rl.training.engine import Engine
from mcore_rl.training.layers import transformer_engine_lacks
from mcore_rl.training.logprobs import cache_sized_chunk_bytes, token_logprobs
from mcore_rl.training.sequences import PackedSequences
from mcore_rl.types import LossInputs, TrainBatch
from tests.invariance.cases import MODELS, Case, Problem
from tests.support import batches, full_weights, hf_reference
from tests.support.engine_runs import engine_config
from tests.support.full_weights import Weights


@dataclass(frozen=True)
class Setting:
    """How the engine computes, and how far that may be from the reference.

    score: mean error of log-probs and entropies in nats.  worst: their largest error.  loss: relative error.
    gradient: error of each parameter's gradient, relative to its norm.
    """

    precision: Precision
    layer_spec: LayerSpec
    score: float
    worst: float
    loss: float
    gradient: float

    def __str__(self) -> str:
        return f"{self.precision.value}-{self.layer_spec.value}"


FLOAT32 = Setting(Precision.float32, LayerSpec.local, score=1e-5, worst=1e-4, loss=1e-4, gradient=1e-4)
BFLOAT16 = Setting(Precision.bfloat16, LayerSpec.local, score=0.015, worst=0.06, loss=0.01, gradient=0.07)
SETTINGS = (FLOAT32, BFLOAT16, replace(BFLOAT16, layer_spec=LayerSpec.transformer_engine))


@dataclass(frozen=True)
class Found:
    """What one side computed; gradients under Megatron's checkpoint keys."""

    logprobs_T: Tensor
    entropy_T: Tensor
    loss: float
    gradients: Weights


def rounded(name: str, precision: Precision) -> hf_reference.PreTrainedModel:
    """The reference with weights that ``precision`` holds exactly.  Its rotary frequencies stay as they are."""
    reference = hf_reference.build(MODELS[name])
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(parameter.to(getattr(torch, precision.value)))
    return reference


def build_engine(platform: Platform, setting: Setting, name: str, start: Weights, groups: object) -> Engine:
    """An engine whose step leaves weights and gradients as they are: rate 0, no clipping."""
    config = replace(
        engine_config(Case(problem=Problem(model=name)), platform.kind),
        precision=setting.precision,
        layer_spec=setting.layer_spec,
        optim=OptimizerConfig(lr=0.0, weight_decay=0.0, clip_grad=0.0),
    )
    engine = Engine("actor", MODELS[name], ParallelConfig(), config, groups, platform)  # type: ignore[arg-type]
    engine.load_weights(lambda models: full_weights.load_full(models, start))
    return engine


def engine_side(rank: Rank, kind: Device, setting: Setting, names: Sequence[str]) -> dict[str, Found]:
    """One process: every model, one after another."""
    platform = detect(kind)
    torch.set_float32_matmul_precision("highest")
    rank.init_process_group(platform)
    groups = init_groups(Layout.of(ParallelConfig(), 1), platform, device_of(platform, 0), seed=1)
    results = {}
    for name in names:
        start = hf_reference.full_weights(rounded(name, setting.precision), MODELS[name])
        batch = batches.ragged(MODELS[name].vocab_size)
        if MODELS[name].moe is not None and setting.precision is not Precision.float32:
            chooser = build_engine(platform, FLOAT32, name, start, groups)
            batch = replace(batch, routing_TLK=chooser.score(batch, record_routing=True).routing_TLK)
        engine = build_engine(platform, setting, name, start, groups)
        scores = engine.score(batch)
        step = engine.train_step(batch, batches.policy_loss, batches.denominators(batch), with_entropy=True)
        assert step.skipped is None and scores.logprobs_T is not None and scores.entropy_T is not None
        results[name] = Found(scores.logprobs_T, scores.entropy_T, step.loss, gradients_of(engine, start))
    destroy_groups()
    return results


def gradients_of(engine: Engine, like: Weights) -> Weights:
    """The float32 gradients of the last step, on the CPU.  The engine is of no use afterwards."""
    for parameter in engine.models[0].parameters():
        parameter.data = parameter.main_grad.float().cpu()
    return full_weights.gather_full(engine.models, like)


@lru_cache
def engine_found(kind: Device, setting: Setting, names: tuple[str, ...]) -> dict[str, Found]:
    return run_ranks(engine_side, 1, (kind, setting, names), timeout_s=600)[0]


@lru_cache
def reference_found(name: str, precision: Precision) -> Found:
    """transformers, one sequence at a time, under autograd."""
    model, reference = MODELS[name], rounded(name, precision)
    batch = batches.ragged(model.vocab_size)
    logprobs, entropies = [], []
    for tokens in batch.tokens_T.split(batch.lengths_S):
        log_p = torch.log_softmax(reference(tokens[None]).logits[0].float(), dim=-1)
        logprobs.append(torch.cat([torch.zeros(1), log_p[:-1].gather(1, tokens[1:, None])[:, 0]]))
        entropies.append(torch.cat([torch.zeros(1), -(log_p.exp() * log_p).sum(-1)[:-1]]))
    logprobs_T, entropy_T = torch.cat(logprobs), torch.cat(entropies)
    loss = batches.policy_loss(loss_inputs(batch, logprobs_T, entropy_T)).total / batches.denominators(batch).loss
    loss.backward()
    gradients = hf_reference.full_weights(reference, model, gradients=True)
    return Found(logprobs_T.detach(), entropy_T.detach(), loss.item(), gradients)


def loss_inputs(batch: TrainBatch, logprobs_T: Tensor, entropy_T: Tensor) -> LossInputs:
    """The whole batch as one microbatch of one rank, with a row for each token."""
    return LossInputs(
        mask_N=batch.mask_T,
        sequence_N=torch.arange(len(batch.lengths_S)).repeat_interleave(torch.tensor(batch.lengths_S)),
        num_sequences=len(batch.lengths_S),
        sum_over_context=lambda sums_S: sums_S,
        logprobs_N=logprobs_T,
        entropy_N=entropy_T,
        old_logprobs_N=batch.old_logprobs_T,
        advantages_N=batch.advantages_T,
    )


def models_for(platform: Platform, setting: Setting) -> tuple[str, ...]:
    """All on an accelerator that the layers can be.  On the CPU, where tests/parity has them all, one of each kind."""
    if not platform.is_accelerator:
        return ("dense", "moe", "gemma2")
    if setting.layer_spec is LayerSpec.local:
        return tuple(MODELS)
    return tuple(name for name, model in MODELS.items() if not transformer_engine_lacks(model, ParallelConfig()))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_engine_agrees_with_transformers(platform: Platform, setting: Setting, name: str) -> None:
    if setting.layer_spec is LayerSpec.transformer_engine and not (
        platform.is_accelerator and have_transformer_engine()
    ):
        pytest.skip("needs an accelerator and Transformer Engine")
    if setting.layer_spec is LayerSpec.transformer_engine and transformer_engine_lacks(MODELS[name], ParallelConfig()):
        pytest.skip("refused: Transformer Engine has not all that this model needs")
    if name not in models_for(platform, setting):
        pytest.skip("one model of each kind is enough on the CPU")
    ours = engine_found(platform.kind, setting, models_for(platform, setting))[name]
    theirs = reference_found(name, setting.precision)
    for what in ("logprobs_T", "entropy_T"):
        error_T = (getattr(ours, what) - getattr(theirs, what)).abs()
        print(f"{what}: mean error {error_T.mean():.1e}, largest {error_T.max():.1e}")
        assert error_T.mean() < setting.score and error_T.max() < setting.worst, what
    print(f"loss: relative error {abs(ours.loss / theirs.loss - 1):.1e}")
    assert ours.loss == pytest.approx(theirs.loss, rel=setting.loss)
    assert ours.gradients.keys() == theirs.gradients.keys()
    errors = {key: float((ours.gradients[key] - true).norm() / true.norm()) for key, true in theirs.gradients.items()}
    print(f"gradients: largest relative error {max(errors.values()):.1e}")
    assert max(errors.values()) < setting.gradient, {key: f"{error:.1e}" for key, error in errors.items()}


LENGTHS = (64, 8, 200, 32)


def attention_inputs(packed: PackedSequences, dtype: torch.dtype) -> list[Tensor]:
    """This rank's queries, the keys and values of all, and a gradient of the output; values that ``dtype`` holds."""
    random = torch.Generator().manual_seed(0)
    num_keys = sum(packed.padded_lengths)
    shapes = [(num_keys // packed.cp, 8, 64), (num_keys, 2, 64), (num_keys, 2, 64), (num_keys // packed.cp, 8, 64)]
    return [torch.randn(shape, generator=random).to(dtype) for shape in shapes]


def attend(
    kernel: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    packed: PackedSequences,
    device: torch.device,
    *others: float | None,
) -> list[Tensor]:
    """The output and the gradients of query, key and value, in float64 on the CPU."""
    query, key, value = (x.detach().to(device).requires_grad_() for x in inputs[:3])
    out = kernel(query, key, value, packed, 64**-0.5, *others)
    gradients = torch.autograd.grad(out, (query, key, value), inputs[3].to(out))
    return [x.detach().double().cpu() for x in (out, *gradients)]


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("cp", "cp_rank"), [(1, 0), (2, 0), (2, 1)])
def test_attention_kernels_agree(platform: Platform, cp: int, cp_rank: int, window: int | None) -> None:
    """Both kernels of ``PackedAttention`` in bfloat16 against its SDPA loop in float64.

    Bounds: outputs and the probabilities inside are rounded to 8 bits, 2e-3 on average; gradients go through three
    such products.
    """
    device, cpu = set_device(platform, 0), torch.device("cpu")
    packed = PackedSequences.of(LENGTHS, LENGTHS, cp, cp_rank, device)
    inputs = attention_inputs(packed, torch.bfloat16)
    expected = attend(attend_one_by_one, [x.double() for x in inputs], packed, cpu, window)
    kernels = {"SDPA": attend_one_by_one}
    if varlen_can_run(inputs[0].to(device), inputs[2].to(device), packed, window):
        kernels["varlen"] = attend_varlen
    is_its_case = platform.is_accelerator and cp == 1 and window is None
    assert "varlen" in kernels or not is_its_case, "whole sequences in bfloat16 are its case"
    for name, kernel in kernels.items():
        agree(name, attend(kernel, inputs, packed, device, window), expected)
    expected = attend(attend_capped, [x.double() for x in inputs], packed, cpu, 1.5, window)
    agree("capped", attend(attend_capped, inputs, packed, device, 1.5, window), expected)


def agree(name: str, tensors: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Output and gradients of one kernel, within the bounds of ``test_attention_kernels_agree``."""
    for what, ours, theirs in zip(("out", "query", "key", "value"), tensors, expected, strict=True):
        error = ((ours - theirs).norm() / theirs.norm()).item()
        print(f"{name}, {what}: relative error {error:.1e}")
        assert error < (5e-3 if what == "out" else 1e-2), f"{name}: {what}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_token_logprobs_agree_with_float64(platform: Platform, dtype: torch.dtype) -> None:
    """Values are computed in float32 from logits of any dtype: 1e-5 nats of about 10.

    Gradients are rounded to the dtype of the logits: 2^-9 of each at most in bfloat16, and about 1e-6 in float32.
    """
    device, random = set_device(platform, 0), torch.Generator().manual_seed(0)
    vocab_size, num_tokens, temperature = 5_003, 301, 0.7
    logits_TV = (3 * torch.randn(num_tokens, vocab_size + 5, generator=random)).to(dtype)  # 5 columns of padding
    targets_T = torch.randint(vocab_size, (num_tokens,), generator=random)
    upstream_2T = torch.randn(2, num_tokens, generator=random)

    leaf_TV = logits_TV.to(device, copy=True).requires_grad_()  # its values are overwritten
    outputs = token_logprobs(
        leaf_TV.view_as(leaf_TV), targets_T.to(device), vocab_size=vocab_size, temperature=temperature,
        chunk_bytes=cache_sized_chunk_bytes(platform) // 8,  # several chunks
    )  # fmt: skip
    (grad_TV,) = torch.autograd.grad(torch.stack(outputs), leaf_TV, upstream_2T.to(device))  # type: ignore[arg-type]

    exact_TV = logits_TV.double().requires_grad_()
    log_p_TV = torch.log_softmax(exact_TV[:, :vocab_size] / temperature, dim=-1)
    expected = (log_p_TV.gather(1, targets_T[:, None])[:, 0], -(log_p_TV.exp() * log_p_TV).sum(-1))
    (exact_grad_TV,) = torch.autograd.grad(torch.stack(expected), exact_TV, upstream_2T.double())

    for ours_T, theirs_T in zip(outputs, expected, strict=True):
        assert ours_T is not None
        torch.testing.assert_close(ours_T.cpu().double(), theirs_T, rtol=0, atol=1e-5)
    torch.testing.assert_close(
        grad_TV.cpu().double(), exact_grad_TV, rtol=2**-8 if dtype is torch.bfloat16 else 1e-4, atol=1e-7
    )
