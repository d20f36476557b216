"""The engine's own promises: what it refuses, what temperature means, what a loss is given, how a rank fails."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_rl.config.engine import (
    AuxLoss,
    Device,
    LayerSpec,
    MoeTrainConfig,
    OptimizerConfig,
    OptimizerKind,
    Precision,
)
from mcore_rl.config.model import ModelConfig, TowerKind, VisionConfig
from mcore_rl.config.parallel import parse_layout
from mcore_rl.ground.errors import ConfigError, Violation, WorkerError
from mcore_rl.ground.types import LossInputs, LossSums, StepResult, TokenScores, TrainBatch
from mcore_rl.parallel.device import Platform
from mcore_rl.parallel.groups import ProcessGroups
from mcore_rl.parallel.launch import Rank
from mcore_rl.parallel.layout import Layout
from mcore_rl.training import layers
from mcore_rl.training.engine import Engine
from mcore_rl.training.layers import resolve_layer_spec, transformer_engine_problem
from tests.support import batches, engines, models
from tests.support.forked import run_ranks

TOLERANCE = 1e-5
VISION = VisionConfig(
    kind=TowerKind.qwen3_vl, depth=1, hidden_size=8, num_heads=2, ffn_hidden_size=8, patch_size=2, num_positions=4
)
MODEL = models.dense()
TEMPERATURES = (0.5, 1.0, 2.0)
LAYOUTS = ("", "pp=2")
HANG_S = 20.0

# ---- refusals ----


def refusal(**changes: Any) -> str:
    """What building says; all is refused before anything of ``groups`` is looked at but the size of the world."""
    layout = changes.pop("layout", "")
    shape = Layout.of(parse_layout(""), changes.pop("world_size", 4))
    groups: Any = SimpleNamespace(layout=shape)
    model = changes.pop("model", MODEL)
    platform = changes.pop("platform", engines.CPU)
    with pytest.raises(ConfigError) as refused:
        Engine("actor", model, parse_layout(layout), engines.config(**changes), groups, platform)
    return str(refused.value)


def test_everything_wrong_is_said_at_once() -> None:
    message = refusal(
        model=models.moe(num_attention_heads=6, num_query_groups=4),
        layout="tp=4,ep=3,cp=2",
        layer_spec=LayerSpec.transformer_engine,
        microbatch_tokens=None,
        moe=MoeTrainConfig(aux_loss=AuxLoss.sequence),
        world_size=4,
    )
    assert message.startswith("8 problems in the configuration:")
    for key in (
        "model.num_query_groups=4", "microbatch_tokens=None",
        "moe.aux_loss_coeff=0.0", "layer_spec=transformer_engine", "world_size=4", "parallel.tp=4", "parallel.ep=3",
    ):  # fmt: skip
        assert f"  - {key}: " in message, key
    assert message.count("  - world_size=4: ") == 2  # neither dense nor expert coordinates divide the world
    assert "does not divide model.num_attention_heads=6" in message
    assert "does not divide model.moe.num_experts=4. Write parallel.ep=" in message
    assert "Nearest layouts that fit 4 processes" in message


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"layout": "tp=4", "model": models.dense(num_attention_heads=12, num_query_groups=6)},
            "parallel.tp=4: neither divides model.num_query_groups=6 nor is a multiple of it. Write parallel.tp=2, 3",
        ),
        ({"layout": "ep=2"}, "parallel.ep=2: the model has no experts. Write parallel.ep=1"),
        ({"layout": "pp=2", "model": models.dense(num_layers=3)}, "Write parallel.pipeline_layers=[2,1]"),
        ({"layout": "pp=8", "world_size": 8}, "pp=8 * vpp=1 is 8 chunks for 4 layers"),
        ({"layout": "tp=3"}, "world_size=4: is not divisible by tp=3 * pp=1 * cp=1 = 3"),
        ({"layer_spec": LayerSpec.transformer_engine}, "layer_spec=transformer_engine: it runs on accelerators only"),
        (
            {"microbatch_tokens": None},
            "microbatch_tokens=None: either this or microbatch_sequences (=None) sets the size",
        ),
        ({"microbatch_sequences": 2}, "microbatch_tokens=64: either this or microbatch_sequences (=2) sets the size"),
        ({"microbatch_tokens": 0}, "microbatch_tokens=0: must be positive"),
        (
            {"precision": Precision.bfloat16, "platform": replace(engines.CPU, supports_bf16=False)},
            "precision=bfloat16: ",
        ),
        (
            {"model": models.dense(vision=VISION), "microbatch_tokens": None, "microbatch_sequences": 2},
            "microbatch_sequences=2: leaves sequences with pictures unpacked. Write microbatch_tokens",
        ),
        ({"max_nonfinite_steps": 0}, "max_nonfinite_steps=0: must be positive"),
        ({"model": models.gemma2(attention_soft_cap=0.0)}, "model.attention_soft_cap=0.0: must be positive"),
        ({"model": models.gemma2(output_soft_cap=-1.0)}, "model.output_soft_cap=-1.0: must be positive"),
        ({"model": models.moe(sandwich_norm=True)}, "model.sandwich_norm=True: no norm can stand behind experts"),
    ],
)
def test_one_thing_wrong(changes: dict[str, Any], expected: str) -> None:
    assert expected in refusal(**changes)


def test_transformer_engine_is_asked_for_where_it_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = replace(engines.CPU, kind=Device.cuda, device_type="cuda")
    auto, local, wanted = LayerSpec.auto, LayerSpec.local, LayerSpec.transformer_engine
    bf16, fp32 = Precision.bfloat16, Precision.float32

    def resolve(
        spec: LayerSpec, precision: Precision, platform: Platform, model: ModelConfig = MODEL, layout: str = ""
    ) -> tuple[LayerSpec, list[Violation]]:
        return resolve_layer_spec(spec, transformer_engine_problem(model, parse_layout(layout), precision, platform))

    for installed in (False, True):
        monkeypatch.setattr(layers, "have_transformer_engine", lambda installed=installed: installed)
        assert resolve(auto, bf16, engines.CPU) == (local, [])
        assert resolve(auto, bf16, gpu) == (wanted if installed else local, [])
        assert resolve(auto, fp32, gpu) == (local, []), "its packed attention has no float32 kernel"
        assert resolve(local, bf16, gpu) == (local, [])
        (violation,) = resolve(wanted, bf16, engines.CPU)[1]
        assert "accelerators only" in violation.problem and "layer_spec=local" in violation.remedy
        problems = [str(violation) for violation in resolve(wanted, bf16, gpu)[1]]
        assert bool(problems) != installed and all("cannot be imported" in problem for problem in problems)
        (violation,) = resolve(wanted, fp32, gpu)[1]
        assert ("float32" in violation.problem) == installed
    # installed: what the model needs decides
    assert resolve(wanted, bf16, gpu, models.windowed()) == (wanted, [])
    no_cap = models.gemma2(attention_soft_cap=None)
    for model, layout, what in (
        (models.gemma2(), "", "soft cap"), (no_cap, "", "norm behind"), (models.windowed(), "cp=2", "sliding window"),
        (models.gpt_oss(), "", "no sinks"),
    ):  # fmt: skip
        assert resolve(auto, bf16, gpu, model, layout) == (local, [])
        (violation,) = resolve(wanted, bf16, gpu, model, layout)[1]
        assert what in violation.problem and "layer_spec=auto" in violation.remedy


def test_with_muon_an_engine_on_a_gpu_takes_the_local_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Building stops at something else, and says nothing of Muon or layers."""
    monkeypatch.setattr(layers, "have_transformer_engine", lambda: True)
    gpu = replace(engines.CPU, kind=Device.cuda, device_type="cuda")
    changes: dict[str, Any] = {
        "platform": gpu, "precision": Precision.bfloat16, "max_nonfinite_steps": 0,
        "optim": OptimizerConfig(optimizer=OptimizerKind.muon),
    }  # fmt: skip
    said = refusal(**changes, layer_spec=LayerSpec.auto)
    assert "max_nonfinite_steps" in said and "muon" not in said.lower() and "layer_spec" not in said
    assert "layer_spec=transformer_engine: Muon" in refusal(**changes, layer_spec=LayerSpec.transformer_engine)


# ---- scores and steps, on two ranks ----


@dataclass
class Observed:
    """One rank under one layout.  scores: by temperature.  logits_TV: of its share's tokens, on the last stage."""

    batch: TrainBatch
    logits_TV: Tensor | None
    scores: dict[float, TokenScores]
    without_entropy: TokenScores
    bf16: TokenScores
    step: StepResult
    seen: dict[float, list[dict[str, Tensor]]]
    refused: str = ""
    has_optimizer: bool = True
    frozen: TokenScores | None = None


def marked(batch: TrainBatch) -> TrainBatch:
    """Every field tells the token that it belongs to."""
    mark_T = torch.arange(batch.tokens_T.numel()) + 1.0
    return replace(
        batch, old_logprobs_T=mark_T, ref_logprobs_T=mark_T + 0.1, rollout_logprobs_T=mark_T + 0.2,
        advantages_T=mark_T + 0.3, returns_T=mark_T + 0.4, old_values_T=mark_T + 0.5,
    )  # fmt: skip


MARKS = {
    "old_logprobs_N": 0.0, "ref_logprobs_N": 0.1, "rollout_logprobs_N": 0.2, "advantages_N": 0.3, "returns_N": 0.4,
    "old_values_N": 0.5,
}  # fmt: skip


def _logits(engine: Engine, batch: TrainBatch) -> Tensor | None:
    """The model's own logits, sequence by sequence, caught at the end of the last stage."""
    caught: list[Tensor] = []
    hook = engine.models[0].register_forward_hook(lambda _, __, output: caught.append(output[0].clone()))
    engine.score(batch)
    hook.remove()
    if not engine.groups.is_last_stage:
        return None
    assert len(caught) == len(batch.lengths_S)
    return torch.cat([logits[:length] for logits, length in zip(caught, batch.lengths_S, strict=True)])


def _observe_layout(groups: ProcessGroups, layout: str) -> Observed:
    def build(trainable: bool = True, **changes: object) -> Engine:
        optim = OptimizerConfig(lr=0.0, clip_grad=0.0)
        return engines.build(groups, MODEL, engines.config(optim=optim, **changes), layout=layout, trainable=trainable)

    whole = batches.ragged(MODEL.vocab_size)
    batch, seen = engines.share_of(whole, groups), {}
    for temperature in TEMPERATURES:
        rows: list[dict[str, Tensor]] = []

        def loss(inputs: LossInputs, rows: list[dict[str, Tensor]] = rows) -> LossSums:
            tensors = {name: value for name, value in vars(inputs).items() if isinstance(value, Tensor)}
            rows.append({name: value.detach().clone() for name, value in tensors.items()})
            assert inputs.logprobs_N is not None
            ones = inputs.mask_N.float().sum()
            return LossSums(
                total=0 * inputs.logprobs_N.sum() + 3 * ones,
                metrics={"trained": ones, "sequences": ones * 0 + inputs.num_sequences},
            )

        step = build().train_step(marked(batch), loss, batches.denominators(whole), temperature=temperature)
        seen[temperature] = rows
    one_by_one = build(microbatch_tokens=None, microbatch_sequences=1)
    frozen = build(trainable=False)
    result = Observed(
        batch=batch,
        logits_TV=_logits(one_by_one, batch),
        scores={temperature: build().score(batch, temperature=temperature) for temperature in TEMPERATURES},
        without_entropy=build().score(batch, with_entropy=False),
        bf16=build(precision=Precision.bfloat16).score(batch),
        step=step,
        seen=seen,
        has_optimizer=frozen.optimizer is not None,
        frozen=frozen.score(batch),
    )
    try:
        frozen.train_step(batch, batches.policy_loss, batches.denominators(whole))
    except AssertionError as error:
        result.refused = str(error)
    return result


def _observe(rank: Rank) -> dict[str, Observed]:
    by_layout = {}
    with engines.world(rank):
        for layout in LAYOUTS:
            with engines.groups_of(layout) as groups:
                by_layout[layout] = _observe_layout(groups, layout)
    return by_layout


@pytest.fixture(scope="module")
def observed(processes: None) -> list[dict[str, Observed]]:
    return run_ranks(_observe, 2)


Ranks = list[dict[str, Observed]]


def first_tokens(batch: TrainBatch) -> Tensor:
    first_T = torch.zeros(batch.tokens_T.numel(), dtype=torch.bool)
    first_T[list(batch.offsets_S)] = True
    return first_T


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_temperature_divides_the_logits(layout: str, temperature: float, observed: Ranks) -> None:
    """Log-prob and entropy of softmax(logits / t), in float64 from the model's own float32 logits."""
    for seen in (rank[layout] for rank in observed):
        logits_TV = seen.logits_TV if seen.logits_TV is not None else observed[-1][layout].logits_TV
        assert logits_TV is not None
        log_softmax_TV = torch.log_softmax(logits_TV.double() / temperature, dim=-1)
        first_T = first_tokens(seen.batch)
        logprobs_T = torch.zeros(first_T.numel(), dtype=torch.float64)
        entropy_T = logprobs_T.clone()
        rows = (~first_T).nonzero()[:, 0]
        logprobs_T[rows] = log_softmax_TV[rows - 1].gather(1, seen.batch.tokens_T[rows, None])[:, 0]
        entropy_T[rows] = -(log_softmax_TV.exp() * log_softmax_TV).sum(-1)[rows - 1]
        scores = seen.scores[temperature]
        assert scores.logprobs_T is not None and scores.entropy_T is not None and scores.values_T is None
        torch.testing.assert_close(scores.logprobs_T.double(), logprobs_T, rtol=TOLERANCE, atol=TOLERANCE)
        torch.testing.assert_close(scores.entropy_T.double(), entropy_T, rtol=TOLERANCE, atol=TOLERANCE)
        assert not scores.logprobs_T[first_T].any() and not scores.entropy_T[first_T].any()


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loss_sees_what_was_scored_beside_its_tokens_fields(
    layout: str, temperature: float, observed: Ranks
) -> None:
    """Each trained row carries the marks of one token, each trained token comes once, all other rows hold zeros."""
    for seen in (rank[layout] for rank in observed):
        batch, trained = seen.batch, []
        for rows in seen.seen[temperature]:
            mask_N = rows["mask_N"]
            predicts_N = rows["old_logprobs_N"] != 0
            token_N = rows["old_logprobs_N"].long() - 1
            trained += token_N[mask_N].tolist()
            assert torch.equal(mask_N[predicts_N], batch.mask_T[token_N[predicts_N]]) and not mask_N[~predicts_N].any()
            for name, mark in MARKS.items():
                assert torch.equal(rows[name][predicts_N], token_N[predicts_N] + 1 + mark), name
                assert not rows[name][~predicts_N].any(), name
            logprobs_T = seen.scores[temperature].logprobs_T
            assert logprobs_T is not None and "entropy_N" not in rows and "values_N" not in rows
            torch.testing.assert_close(rows["logprobs_N"][predicts_N], logprobs_T[token_N[predicts_N]])
            assert not rows["logprobs_N"][~predicts_N].any()
        if seen.seen[temperature]:
            assert sorted(trained) == batch.mask_T.nonzero()[:, 0].tolist()
            assert len(seen.seen[temperature]) > 1
    assert all(observed[1][layout].seen.values()) and bool(observed[0][layout].seen[1.0]) == (layout == "")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_are_over_all_ranks_and_divided_once(layout: str, observed: Ranks) -> None:
    whole = batches.ragged(MODEL.vocab_size)
    assert observed[0][layout].step == observed[1][layout].step
    step = observed[0][layout].step
    assert step.loss == pytest.approx(3.0, rel=1e-6)  # 3 for each trained token, divided by their number
    assert step.metrics == {"trained": float(whole.mask_T.sum()), "sequences": float(len(whole.lengths_S))}
    assert step.skipped is None and step.grad_norm == 0.0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_entropy_is_left_out_where_nobody_wants_it(layout: str, observed: Ranks) -> None:
    for seen in (rank[layout] for rank in observed):
        assert seen.without_entropy.entropy_T is None
        assert engines.same_bits(seen.without_entropy.logprobs_T, seen.scores[1.0].logprobs_T)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_engine_that_only_scores(layout: str, observed: Ranks) -> None:
    for seen in (rank[layout] for rank in observed):
        assert not seen.has_optimizer
        assert seen.refused == "the actor was built to score only"
        assert seen.frozen is not None and engines.same_bits(vars(seen.frozen), vars(seen.scores[1.0]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bf16_scores_are_those_of_float32_but_for_its_rounding(layout: str, observed: Ranks) -> None:
    """bfloat16 keeps 8 bits, so a rounding is off by up to 2^-9 of a number, 0.0011 in the root mean square.  A logit
    of this model is about 0.7 and has some 40 roundings behind it, each independent: sqrt(40) * 0.0011 * 0.7 = 0.005,
    and four times that for the largest of a hundred.  The bounds are three times both, 0.015 and 0.06."""
    for seen in (rank[layout] for rank in observed):
        ours_T, theirs_T = seen.bf16.logprobs_T, seen.scores[1.0].logprobs_T
        assert ours_T is not None and theirs_T is not None and ours_T.dtype == torch.float32
        error_T = (ours_T - theirs_T).abs()
        assert error_T.max() < 0.06 and error_T.mean() < 0.015
        assert error_T.max() > 1e-4, "nothing was rounded"


# ---- a rank that fails ----


def _fail(rank: Rank, layout: str, how: str, when: Path) -> None:
    """Rank 1 fails in microbatch 1 of a step; ``when`` is written the moment before."""
    with engines.world(rank), engines.groups_of(layout) as groups:
        engine = engines.build(groups, MODEL, engines.config(microbatch_tokens=32), layout=layout)
        whole, calls = batches.ragged(MODEL.vocab_size), iter(range(100))

        def fail(*_: object) -> None:
            if rank.rank == 1 and next(calls) == 1:
                when.write_text(str(time.monotonic()))
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("advantages are missing")

        def loss(inputs: LossInputs) -> LossSums:
            if how == "raise":
                fail()
            return batches.policy_loss(inputs)

        if how == "kill":
            engine.models[0].decoder.register_forward_pre_hook(fail)
        batch = engines.share_of(whole, groups)
        engine.train_step(batch, loss, batches.denominators(whole), with_entropy=True)


@pytest.mark.parametrize(
    ("layout", "how", "named", "where", "cause"),
    [
        ("", "raise", "rank 1 (dp1 pp0 tp0 cp0 ep0)", "loss, microbatch 1", "ValueError: advantages are missing"),
        ("pp=2", "kill", "rank 1 (dp0 pp1 tp0 cp0 ep0)", "forward, microbatch 1", "killed by SIGKILL"),
    ],
)
def test_a_failing_rank_brings_all_down_and_is_named(
    layout: str, how: str, named: str, where: str, cause: str, tmp_path: Path, processes: None
) -> None:
    when = tmp_path / "failed_at"
    with pytest.raises(WorkerError) as failed:
        run_ranks(_fail, 2, (layout, how, when), layout=Layout.of(parse_layout(layout), 2))
    assert time.monotonic() - float(when.read_text()) < HANG_S  # not one of the time-outs of minutes
    first, *others = str(failed.value).splitlines()
    assert first.startswith(f"{named} failed on ")
    assert f"in train_step, role actor > {where}: {cause}" in first
    (other,) = [line for line in others if line.startswith("  rank 0 (")]
    assert "in train_step, role actor" in other
    assert ("Traceback of rank 1:" in others) == (how == "raise")
