"""Weights, gradients and optimizer state of a rank, to the byte, beside what Megatron allocates.

At full size its own buffers and shards are built on the meta device, behind torch's fake process group; of tiny models
of odd widths, real processes with real optimizers are asked.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from mcore_rl.config.engine import Precision
from mcore_rl.config.lora import LoraConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.parallel import parse_layout
from mcore_rl.config.role import Head
from mcore_rl.families.checkpoints import find_checkpoint, published_config
from mcore_rl.families.registry import FAMILIES, model_of
from mcore_rl.parallel.launch import Rank
from mcore_rl.planning.states import Bucket, ModelSizes, States, family_for
from mcore_rl.training.meta import meta_chunks
from mcore_rl.training.vision import set_trained
from tests.support import adapters, batches, engines, models, published
from tests.support.forked import run_ranks

MIXTRAL = "mistralai/Mixtral-8x22B-Instruct-v0.1"
QWEN_72B = "Qwen/Qwen2.5-72B-Instruct"
DEEPSEEK = "deepseek-ai/DeepSeek-V3"


def published_model(hf_id: str) -> ModelConfig:
    return model_of(published.FACTS[hf_id])[1]


def allocated_on_meta(
    model: ModelConfig, layout: str, world_size: int, rank: int, layers: list[int] | None, head: Head,
    overlap: bool, monkeypatch: pytest.MonkeyPatch, learns_to_see: bool = False,
) -> tuple[int, int, int, int]:  # fmt: skip
    """(parameters, elements of Megatron's buffers, elements of this rank's shards, buckets)."""
    parallel = parse_layout(layout)
    parallel.pipeline_layers = layers
    held = padded = shards = buckets = 0
    with meta_chunks(model, parallel, world_size, rank, head=head) as chunks, monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "current_device", lambda: torch.device("meta"))
        for index, chunk in enumerate(chunks):
            if hasattr(chunk, "vision"):
                set_trained(chunk.vision, learns_to_see, sums_over_tensor_ranks=False)
            ddp = DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=overlap
            )
            wrapped = DistributedDataParallel(chunk.config, ddp, chunk, disable_bucketing=overlap and index > 0)
            held += sum(parameter.numel() for parameter in chunk.parameters())
            for buffer in (*wrapped.buffers, *wrapped.expert_parallel_buffers):
                assert buffer.param_data.numel() == buffer.grad_data.numel()
                assert buffer.grad_data.dtype == torch.float32
                padded += buffer.grad_data.numel()
                buckets += len(buffer.buckets)
                for index in range(len(buffer.buckets)):
                    ranges = DistributedOptimizer._build_model_gbuf_range(buffer, index)["param_map"].values()
                    shards += sum(each["param"].size for each in ranges)
    return held, padded, shards, buckets


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("hf_id", "layout", "world_size", "layers", "head", "ranks"),
    [
        (MIXTRAL, "tp=2,pp=4,ep=8", 64, None, Head.lm, (0, 17, 63)),
        (MIXTRAL, "tp=4,pp=4,vpp=2,ep=2,etp=2", 64, None, Head.value, (1, 48)),
        (QWEN_72B, "tp=8,pp=2", 32, None, Head.lm, (0, 9, 31)),
        (QWEN_72B, "tp=4,pp=4,cp=2", 64, None, Head.value, (63,)),
        (DEEPSEEK, "tp=2,pp=16,ep=16", 256, [4] * 13 + [3] * 3, Head.lm, (0, 20, 255)),
        ("google/gemma-2-2b-it", "tp=2,pp=2", 8, None, Head.lm, (0, 3, 7)),
        ("Qwen/Qwen2.5-0.5B-Instruct", "dp", 3, None, Head.lm, (0, 2)),
        ("Qwen/Qwen1.5-MoE-A2.7B-Chat", "tp=2,ep=4", 8, None, Head.lm, (0, 5)),
        ("Qwen/Qwen3-30B-A3B", "pp=3,ep=8", 24, None, Head.lm, (2, 23)),
        ("openai/gpt-oss-20b", "tp=2,pp=2,ep=4", 8, None, Head.lm, (0, 7)),
    ],
)
def test_full_size_is_what_megatron_allocates(
    hf_id: str, layout: str, world_size: int, layers: list[int] | None, head: Head, ranks: tuple[int, ...],
    overlap: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model, layout = published_model(hf_id), layout.removeprefix("dp")
    parallel = parse_layout(layout)
    parallel.pipeline_layers = layers
    states = States(ModelSizes(model, head=head), parallel, world_size, Precision.bfloat16, overlap=overlap)
    for rank in ranks:
        held, padded, shards, buckets = allocated_on_meta(
            model, layout, world_size, rank, layers, head, overlap, monkeypatch
        )
        state, stage = states.of_rank(rank), states.layout.coords(rank).pp
        assert buckets == sum(map(len, states.buckets(stage)))
        assert state.num_parameters == held
        assert (state.weights, state.gradients, state.optimizer) == (2 * padded, 4 * padded, 12 * shards)
        assert states.of_stage(states.layout.coords(rank).pp).total >= state.total


def real_bytes(rank: Rank, cases: list[tuple[str, ModelConfig, Precision, Head]]) -> list[tuple[int, ...]]:
    """(parameters, bytes of weights, gradients and optimizer state) of each case on this rank, after a step of Adam."""
    sizes = []
    with engines.world(rank):
        for layout, model, precision, head in cases:
            with engines.groups_of(layout) as groups:
                settings = engines.config(precision=precision)
                engine = engines.build(groups, model, settings, layout=layout, head=head)
                assert engine.optimizer is not None
                buffers = [each for chunk in engine.chunks for each in (*chunk.buffers, *chunk.expert_parallel_buffers)]
                for part in engine.optimizer.megatron.chained_optimizers:
                    if not part.is_stub_optimizer:
                        for main in itertools.chain(*(group["params"] for group in part.optimizer.param_groups)):
                            main.grad = torch.zeros_like(main)
                        part.optimizer.step()
                weights = {buffer.param_data.untyped_storage().data_ptr() for buffer in buffers}
                state = engine.optimizer.state_tensors()
                sizes.append(
                    (
                        sum(parameter.numel() for chunk in engine.models for parameter in chunk.parameters()),
                        sum(buffer.param_data.nbytes for buffer in buffers),
                        sum(buffer.grad_data.nbytes for buffer in buffers),
                        sum(x.nbytes for x in state if x.untyped_storage().data_ptr() not in weights),
                    )
                )
                del engine
    return sizes


def test_tiny_models_hold_what_real_processes_do(processes: None) -> None:
    """Odd widths, so that gaps lie inside of buffers and which rank has them depends on the order of the modules."""
    tied = models.dense(tie_output=True, qk_norm=True)
    cases = [
        ("", tied, Precision.float32, Head.lm),
        ("pp=2", tied, Precision.bfloat16, Head.lm),
        ("pp=2", tied, Precision.bfloat16, Head.value),
        ("tp=2", models.gemma2(), Precision.bfloat16, Head.lm),
        ("pp=2", models.gemma2(), Precision.float32, Head.lm),
        ("tp=2,ep=2", models.moe(), Precision.bfloat16, Head.lm),
        ("pp=2,vpp=2,ep=2", models.moe(), Precision.float32, Head.lm),
        ("ep=4", models.qwen2_moe(), Precision.bfloat16, Head.lm),
        ("cp=2", models.deepseek_v3(), Precision.bfloat16, Head.value),
        ("tp=2,etp=2", models.deepseek_v3(), Precision.bfloat16, Head.lm),
        ("tp=2,ep=2", models.gpt_oss(hidden_size=50), Precision.bfloat16, Head.lm),
    ]
    real = run_ranks(real_bytes, 4, (cases,), timeout_s=240)
    for index, (layout, model, precision, head) in enumerate(cases):
        states = States(ModelSizes(model, head=head), parse_layout(layout), 4, precision)
        for rank in range(4):
            state = states.of_rank(rank)
            ours = (state.num_parameters, state.weights, state.gradients, state.optimizer)
            assert ours == real[rank][index], f"{layout} {precision} rank {rank}"
        for stage in range(states.layout.pp):
            ranks = [rank for rank in range(4) if states.layout.coords(rank).pp == stage]
            assert states.of_stage(stage).total == max(states.of_rank(rank).total for rank in ranks)


def test_a_bucket_by_hand() -> None:
    """In reversed order: 70 elements from 0, 5 from 128, up to 133, and on to a multiple of 128 and of the ranks."""
    bucket = Bucket((((5, 70), 1),))
    assert (bucket.held, bucket.padded(1), bucket.padded(2), bucket.padded(3)) == (75, 256, 256, 384)
    assert [bucket.part(2, rank) for rank in range(2)] == [70, 5]
    even = Bucket((((64, 128), 1),))
    assert even.aligned and not bucket.aligned
    assert [even.part(2, rank) for rank in range(2)] == [128, 64]  # of 256


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize(
    ("name", "layout", "layers", "numbers"),
    [
        ("qwen2.5-vl-7b-instruct", "tp=2,pp=2", [12, 16], (676_550_144, 8_292_166_656)),
        ("qwen3-vl-30b-a3b-instruct", "pp=2,ep=4", None, (538_631_408, 31_070_754_032)),
    ],
)
def test_a_tower_is_in_the_first_chunk_s_buffers_or_beside_them(
    name: str, layout: str, layers: list[int] | None, numbers: tuple[int, int], learns: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """What Megatron allocates for transformers' tower, trained and frozen; the numbers of parameters are published."""
    config = published_config(find_checkpoint(name, published.MODEL_CONFIGS), published.MODEL_CONFIGS)
    _, model = model_of(config, pictures=True)
    parallel = parse_layout(layout)
    parallel.pipeline_layers = layers
    sizes = ModelSizes(model)
    assert (sum(sizes.tower), sizes.num_parameters) == numbers
    states = States(sizes, parallel, 8, Precision.bfloat16, overlap=True, frozen_tower=not learns)
    for rank in (0, 7):
        held, padded, shards, buckets = allocated_on_meta(
            model, layout, 8, rank, layers, Head.lm, True, monkeypatch, learns
        )
        state = states.of_rank(rank)
        stage = states.layout.coords(rank).pp
        beside = 0 if learns or stage else numbers[0]
        assert buckets == sum(map(len, states.buckets(stage)))
        assert state.num_parameters == held
        assert (state.weights, state.gradients, state.optimizer) == (2 * (padded + beside), 4 * padded, 12 * shards)


def test_a_whole_model_has_its_published_number_of_parameters() -> None:
    assert ModelSizes(published_model(MIXTRAL)).num_parameters == 140_630_071_296
    assert ModelSizes(published_model("Qwen/Qwen2.5-0.5B-Instruct")).num_parameters == 494_032_768


def test_every_checkpoint_is_given_tables_of_its_own_sizes() -> None:
    """The family is chosen by features; whichever it is, its tables must have the sizes of the checkpoint's own."""
    for hf_id, config in published.FACTS.items():
        family, model = model_of(config)
        chosen = family_for(model)
        for table in ("weights", "rollout"):
            ours, theirs = (
                sorted(
                    rule.local_shape(model, 1)
                    for rule in getattr(each, table)
                    if rule.only(model) and rule.layers_of(model)
                )
                for each in (chosen, FAMILIES[family.name])
            )
            assert ours == theirs, (hf_id, table)


def test_a_model_that_only_scores_has_weights_alone() -> None:
    states = States(ModelSizes(models.dense()), parse_layout(""), 1, Precision.bfloat16, trainable=False)
    state = states.of_rank(0)
    assert (state.weights, state.gradients, state.optimizer) == (2 * state.num_parameters, 0, 0)


LORA = LoraConfig(rank=3)
OF_ADAPTERS = [
    ("pp=2", models.dense(tie_output=True, qk_norm=True), Precision.bfloat16),
    ("tp=2,ep=2", models.moe(), Precision.bfloat16),
    ("tp=2,etp=2", models.deepseek_v3(), Precision.float32),
]


def adapter_bytes(rank: Rank) -> list[tuple[int, ...]]:
    """As ``real_bytes``, of engines that train adapters; the weights are those of buffers and of frozen tensors."""
    sizes = []
    with engines.world(rank):
        for layout, model, precision in OF_ADAPTERS:
            with engines.groups_of(layout) as groups:
                settings, table = engines.config(precision=precision), adapters.adapter_table
                made = table(model, LORA, parse_layout(layout), groups.layout.world_size)
                engine = engines.build(groups, model, settings, layout=layout, adapters=made)
                assert engine.optimizer is not None
                step = engine.train_step(
                    engines.share_of(batches.ragged(101), groups), batches.policy_loss,
                    batches.denominators(batches.ragged(101)), with_entropy=True,
                )  # fmt: skip
                assert step.skipped is None
                parameters = [each for chunk in engine.models for each in chunk.parameters()]
                storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in parameters}
                buffers = [each for chunk in engine.chunks for each in (*chunk.buffers, *chunk.expert_parallel_buffers)]
                state = engine.optimizer.state_tensors()
                sizes.append(
                    (
                        sum(each.numel() for each in parameters),
                        sum(storages.values()),
                        sum(buffer.grad_data.nbytes for buffer in buffers),
                        sum(x.nbytes for x in state if x.untyped_storage().data_ptr() not in storages),
                    )
                )
                del engine
    return sizes


def test_adapters_hold_what_real_processes_do(processes: None) -> None:
    real = run_ranks(adapter_bytes, 4, (), timeout_s=240)
    for index, (layout, model, precision) in enumerate(OF_ADAPTERS):
        states = States(ModelSizes(model), parse_layout(layout), 4, precision, lora=LORA)
        for rank in range(4):
            state = states.of_rank(rank)
            ours = (state.num_parameters, state.weights, state.gradients, state.optimizer)
            assert ours == real[rank][index], f"{layout} {precision} rank {rank}"
        for stage in range(states.layout.pp):
            ranks = [rank for rank in range(4) if states.layout.coords(rank).pp == stage]
            assert states.of_stage(stage).total == max(states.of_rank(rank).total for rank in ranks)


def test_qwen_72b_with_adapters_by_hand() -> None:
    """Rank 32 on all linears over tp=8: A's of rows whole, B's of columns whole, all else an eighth."""
    model = published_model(QWEN_72B)
    hidden, ffn, key = 8192, 29568, 1024
    whole = 32 * (3 * hidden + 2 * hidden) + 32 * (hidden + hidden)  # A of q, k, v, gate, up; B of o, down
    split = 32 * (hidden + 2 * key + 2 * ffn) + 32 * (hidden + ffn)  # B of these; A of those
    sizes = ModelSizes(model, lora=LoraConfig(rank=32))
    (kind,) = {model.kind(layer) for layer in range(model.num_layers)}
    assert sum(sizes.layer(kind, 8, 1)[0]) == whole + split // 8
    assert sizes.num_parameters == 80 * (whole + split)
    state = States(ModelSizes(model), parse_layout("tp=8"), 8, Precision.bfloat16, lora=LoraConfig(rank=32)).of_rank(0)
    assert state.gradients < 1.2 * 2**30 and state.optimizer < 2.4 * 2**30 and 17 < state.weights / 2**30 < 19
