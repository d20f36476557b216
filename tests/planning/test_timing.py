"""Seconds of a step by hand, with rates that are round numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mcore_rl.config.cluster import ClusterConfig, ReachedRates
from mcore_rl.config.engine import Device, EngineConfig, Precision, Recompute
from mcore_rl.config.launch import load_cluster
from mcore_rl.config.model import ModelConfig, MoeConfig
from mcore_rl.config.parallel import parse_layout
from mcore_rl.config.roles import ActorConfig, TowerTraining
from mcore_rl.config.rollout import UPDATE_BUCKET_BYTES, Quantization, RolloutConfig, RolloutLayout
from mcore_rl.families.flops import forward_flops, matmul_parameters, tower_flops
from mcore_rl.families.registry import model_of
from mcore_rl.planning import timing
from mcore_rl.planning.lengths import RowPictures
from mcore_rl.planning.overheads import (
    EAGER_LAYER_S,
    EXPERT_COLUMN_FLOPS,
    EXPERT_DECODE_S,
    HOST_LINK_GB_S,
    LAYER_LATENCY_S,
    LINK_EFFICIENCY,
    LOCAL_EFFICIENCY,
    LOCAL_EXPERT_EFFICIENCY,
    MATMUL_EFFICIENCY,
    MEMORY_EFFICIENCY,
    NODES_LATENCY_S,
    ROUND_IMBALANCE,
    ROUND_S,
    STEP_LATENCY_S,
)
from mcore_rl.planning.serving import Serving, cache_bytes_per_token, rollout_weight_bytes
from mcore_rl.planning.tables import measured_lines
from mcore_rl.planning.timing import Rates, move_s
from mcore_rl.planning.training import RolePlan, Work
from tests.support import picture_models
from tests.support.settings import actor_config

MODEL = ModelConfig(
    num_layers=4, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, num_query_groups=2, head_dim=16,
    vocab_size=1_024, max_position_embeddings=512,
)  # fmt: skip
EXPERTS = replace(MODEL, moe=MoeConfig(num_experts=8, top_k=2, ffn_hidden_size=32))
RATES = Rates(flops=1e12, memory=1e11, intra=1e10, inter=1e9, per_node=8, accelerator=True)
WORK = Work(sequences=16, longest=128, mean=100.0)


def role(layout: str = "", world_size: int = 1, model: ModelConfig = MODEL, **engine: object) -> RolePlan:
    settings = dict(precision=Precision.bfloat16, recompute=Recompute.none, microbatch_tokens=400)
    config = EngineConfig(**(settings | engine))  # type: ignore[arg-type]
    return RolePlan("actor", model, config, parse_layout(layout), world_size, WORK, accelerator=True)


def test_rates_are_shares_of_the_data_sheet() -> None:
    cluster = ClusterConfig(
        name="a", device=Device.cuda, device_name="NVIDIA H100 80GB HBM3", gpus_per_node=8, memory_gb_s=3_000.0,
        intra_node_gb_s=400.0, inter_node_gb_s=50.0,
    )  # fmt: skip
    rates = Rates.of(cluster, 8, Precision.bfloat16)
    assert rates.flops == pytest.approx(989.4e12 * MATMUL_EFFICIENCY, rel=1e-3)
    assert Rates.of(cluster, 8, Precision.bfloat16, peak=500.0).flops == 500e12 * MATMUL_EFFICIENCY
    assert (rates.memory, rates.intra, rates.inter) == (
        3e12 * MEMORY_EFFICIENCY, 4e11 * LINK_EFFICIENCY, 5e10 * LINK_EFFICIENCY,
    )  # fmt: skip


def test_measured_rates_replace_the_assumed_shares() -> None:
    cluster = load_cluster("nvidia_h100")
    assumed = Rates.of(cluster, 8, Precision.bfloat16)
    cluster.reached = ReachedRates(intra_node_gb_s=371.0, host_link_gb_s=52.0)
    measured = Rates.of(cluster, 8, Precision.bfloat16)
    assert (measured.intra, measured.host, measured.inter) == (371e9, 52e9, assumed.inter)
    assert move_s(1e9, measured) == pytest.approx(1 / 52) and move_s(1e9, assumed) == pytest.approx(1 / 25)
    cluster.measured = "doctor.json"
    assert measured_lines(cluster) == [
        "intra_node_gb_s: 371 GB/s, from doctor.json, in place of 450 * 0.7 of the yaml",
        "host_link_gb_s: 52 GB/s, from doctor.json, in place of 25, assumed",
    ]
    assert measured_lines(load_cluster("nvidia_h100")) == []
    cluster = load_cluster("nvidia_h100", ["residuals.device_context_mib=500", "residuals.host_trainer_mib=2000"])
    cluster.residuals.pinned_ratio = 1.0625
    cluster.name = "here"
    assert measured_lines(cluster) == [
        "500 MiB of a device, by the context of a process, from here.yaml, in place of 614, assumed",
        "2,120 MiB of the host, by a training process and its Ray actor, from here.yaml, in place of 3,072, assumed",
        "page-locked memory takes 1.062 times what is asked for, from here.yaml",
    ]


def test_ranks_on_the_cpu_share_its_cores_and_memory() -> None:
    cluster = ClusterConfig(name="b", cpus_per_node=4, memory_gb_s=40.0)
    one, two = (Rates.of(cluster, ranks, Precision.float32) for ranks in (1, 2))
    assert one.flops == 2 * two.flops and one.memory == 2 * two.memory and not one.accelerator


def test_a_ring_by_hand() -> None:
    """7 of 8 parts cross each link; the slow link counts as soon as the group leaves the node."""
    assert RATES.ring(8e9, 8) == 7e9 / 1e10
    assert RATES.ring(8e9, 16) == pytest.approx(7.5e9 / 1e9)
    assert RATES.ring(8e9, 4, stride=4) == 6e9 / 1e9
    assert RATES.ring(8e9, 1) == 0.0


def test_a_tower_delays_its_stage_and_fewer_layers_there_pay_for_it() -> None:
    """Of two stages, the pictures' forward pass, and twice that and their recompute in training, on the first."""
    _, model = model_of(picture_models.config("qwen2_5_vl", num_hidden_layers=4), pictures=True)
    grid = (64, 64)
    shown = replace(WORK, pictures=RowPictures(mean=(grid,), most=(grid,)))
    learning = actor_config(precision=Precision.bfloat16, recompute=Recompute.none, microbatch_tokens=400)
    frozen = replace(learning, vision=TowerTraining.frozen)

    def spent(config: ActorConfig, work: Work, layers: list[int], *, train: bool) -> float:
        parallel = parse_layout("pp=2")
        parallel.pipeline_layers = layers
        planned = RolePlan("actor", model, config, parallel, 2, work, accelerator=True)
        return timing.pass_s(planned, RATES, 16, train=train)

    once = tower_flops(model, [grid]) * 16 / 1e12 / LOCAL_EFFICIENCY
    bubble = 1 + 1 / (16 * 100 / 400)
    for config, train, passes in ((learning, False, 1), (learning, True, 4), (frozen, True, 1)):
        # With one layer the first stage has less than a third of the second's work: it waits, but for the pictures.
        one, three = (spent(config, WORK, layers, train=train) for layers in ([1, 3], [3, 1]))
        seen = spent(config, shown, [3, 1], train=train)
        assert seen - three == pytest.approx(passes * once * bubble) and three < one
    assert spent(learning, shown, [1, 3], train=True) < spent(learning, shown, [2, 2], train=True)
    assert spent(learning, WORK, [1, 3], train=True) > spent(learning, WORK, [2, 2], train=True)


def test_a_picture_is_encoded_by_one_rank_while_the_others_wait() -> None:
    _, model = model_of(picture_models.config("qwen2_5_vl", num_hidden_layers=4), pictures=True)
    shown = replace(WORK, pictures=RowPictures(mean=((64, 64),), most=((64, 64),)))
    once = tower_flops(model, [(64, 64)]) * 16 / 1e12 / LOCAL_EFFICIENCY
    for tokens, ranks in ((100, 1), (200, 2), (400, 4), (800, 4)):  # of a microbatch of 1, 2, 4 and 8 sequences
        config = actor_config(precision=Precision.bfloat16, microbatch_tokens=tokens)
        planned = RolePlan("actor", model, config, parse_layout("tp=4"), 4, shown, accelerator=True)
        assert timing.tower_s(planned, RATES, 16, train=False) == pytest.approx(once / ranks)


def test_products_of_one_rank_by_hand() -> None:
    alone = role()
    forward = forward_flops(MODEL, [100]) * 16 / 1e12
    assert timing.pass_s(alone, RATES, 16, train=False) == pytest.approx(forward)
    assert timing.pass_s(alone, RATES, 16, train=True) == pytest.approx(3 * forward)
    assert timing.pass_s(role(recompute=Recompute.full), RATES, 16, train=True) == pytest.approx(4 * forward)
    assert timing.pass_s(role(world_size=4), RATES, 16, train=True) == pytest.approx(3 * forward / 4)


def test_tensor_ranks_exchange_rows_four_times_a_layer() -> None:
    row = 2 * 64 / 2 / 1e10  # bfloat16; half of it crosses the link
    assert timing.layer_communication_s(role("tp=2", 2), RATES) == pytest.approx(4 * 4 * row)


def test_more_ranks_than_key_heads_exchange_their_rows() -> None:
    """4 query heads, 2 of keys and 2 of values, of 16 each; and every context rank has a whole key/value head."""
    row, projected = 2 * 64 * 3 / 4 / 1e10, 2 * 8 * 16 * 3 / 4 / 1e10
    assert timing.layer_communication_s(role("tp=4", 4), RATES) == pytest.approx(4 * (4 * row + projected))
    across = timing.layer_communication_s(role("tp=4,cp=2", 8), RATES)
    assert across == pytest.approx(4 * (4 * row + projected) + 4 * 2 * 2 * 16 * 2 / 2 / 1e10)


def test_context_ranks_gather_keys_and_values() -> None:
    """2 groups of 16, keys and values, of both ranks."""
    assert timing.layer_communication_s(role("cp=2", 2), RATES) == pytest.approx(4 * 2 * 2 * 2 * 16 * 2 / 2 / 1e10)


def test_rows_travel_to_experts_and_back() -> None:
    seconds = timing.layer_communication_s(role("ep=4", 4, EXPERTS), RATES)
    assert seconds == pytest.approx(4 * 2 * (2 * 64 * 2) * 3 / 4 / 1e10)


def test_experts_and_local_layers_reach_less_of_the_peak_on_accelerators_alone() -> None:
    """Experts of 32 columns; and of four, where the dense rate is that of four columns."""
    narrow = EXPERT_COLUMN_FLOPS * 32
    assert timing.compute_flops_rate(EXPERTS, RATES) == pytest.approx(1 / (1 / 1e12 + 1 / narrow))
    even = replace(EXPERTS, moe=MoeConfig(num_experts=8, top_k=2, ffn_hidden_size=4))
    assert timing.compute_flops_rate(even, RATES) == pytest.approx(0.5e12), "four columns are the dense rate"
    assert timing.compute_flops_rate(MODEL, RATES, fused=False) == 1e12 * LOCAL_EFFICIENCY
    assert timing.compute_flops_rate(EXPERTS, RATES, fused=False) == 1e12 * LOCAL_EXPERT_EFFICIENCY
    on_cpu = replace(RATES, accelerator=False)
    assert {timing.compute_flops_rate(each, on_cpu, fused=False) for each in (MODEL, EXPERTS)} == {1e12}


@pytest.mark.parametrize(
    ("columns", "peak", "least", "most"),
    [
        (768, 148e12, 0.31, 0.40),  # Qwen3-30B-A3B on 32 to 8 H20: docs/perf/dpsk.md of verl
        (16_384, 989.5e12, 0.75 * 0.493, 0.493),  # Mixtral-8x22B on H100: arXiv:2504.14960
    ],
)
def test_published_mfu_of_experts_that_no_constant_was_fitted_to(
    columns: int, peak: float, least: float, most: float
) -> None:
    model = replace(EXPERTS, moe=MoeConfig(num_experts=8, top_k=2, ffn_hidden_size=columns))
    rate = timing.compute_flops_rate(model, replace(RATES, flops=peak * MATMUL_EFFICIENCY))
    assert least < rate / peak < most


def test_a_device_reaches_its_own_share_of_the_data_sheet() -> None:
    rates = {name: Rates.of(load_cluster(name), 8, Precision.bfloat16) for name in ("amd_mi300x", "nvidia_b200")}
    assert rates["amd_mi300x"].flops == pytest.approx(1307.4e12 * MATMUL_EFFICIENCY * 0.65)
    assert rates["nvidia_b200"].flops == pytest.approx(2250e12 * MATMUL_EFFICIENCY * 0.6)


def test_a_decode_step_waits_for_launches_and_reductions() -> None:
    """Four layers: two reductions each where a layer is split, launches each without graphs, a router each."""
    eager, split = rollout(enforce_eager=True), rollout(tp=2)
    assert timing.decode_latency_s(MODEL, rollout(), RATES) == STEP_LATENCY_S
    assert timing.decode_latency_s(MODEL, split, RATES) == pytest.approx(STEP_LATENCY_S + 8 * LAYER_LATENCY_S)
    assert timing.decode_latency_s(MODEL, eager, RATES) == pytest.approx(STEP_LATENCY_S + 4 * EAGER_LAYER_S)
    assert timing.decode_latency_s(EXPERTS, rollout(), RATES) == pytest.approx(STEP_LATENCY_S + 4 * EXPERT_DECODE_S)
    assert timing.decode_latency_s(MODEL, eager, replace(RATES, accelerator=False)) == 0.0


def test_reductions_over_more_nodes_wait_once_for_every_doubling() -> None:
    waits = [timing.nodes_reduction_s(0.0, size, RATES) for size in (16, 32, 64)]
    assert waits == [pytest.approx(count * NODES_LATENCY_S) for count in (1, 2, 3)]


def test_a_pipeline_waits_for_its_first_microbatch() -> None:
    """16 sequences of 100 tokens are four microbatches: a bubble of a quarter, and rows are handed on twice."""
    two = role("pp=2", 2)
    forward = forward_flops(MODEL, [100]) * 16 / 1e12
    handed = 1_600 * 2 * 64 * 2 / 1e10
    busy = 3 * forward / 2 * max(two.stage_shares)
    assert max(two.stage_shares) > 1  # the projection to the vocabulary
    assert timing.pass_s(two, RATES, 16, train=True) == pytest.approx(busy * (1 + 1 / 4) + handed)
    updates = timing.update_s(two, RATES, 16, 2) - 2 * timing.optimizer_s(two, RATES)
    assert updates == pytest.approx(busy * (1 + 1 / 2) + handed), "two updates of two microbatches each"


def test_an_optimizer_step_by_hand() -> None:
    """Gradients are read, the rank's quarter of moments and main weights read and written, both gathered over 4."""
    four = role(world_size=4)
    state = four.state(0)
    expected = (state.gradients + 2 * state.optimizer) / 1e11 + 0.75 * (state.gradients + state.weights) / 1e10
    assert timing.optimizer_s(four, RATES) == pytest.approx(expected)
    whole = timing.update_s(four, RATES, 32, 2)
    assert whole == pytest.approx(timing.pass_s(four, RATES, 32, train=True) + 2 * expected)


def rollout(**changes: object) -> RolloutConfig:
    settings = dict(dtype=Precision.bfloat16, n=4, max_response_length=200, max_num_seqs=1_000)
    return replace(RolloutConfig(), **(settings | changes))  # type: ignore[arg-type]


def room(cache: int) -> Serving:
    return Serving(weights=0, working=0, overhead=0, budget=0, cache=cache, per_sequence=1)


def test_generation_by_hand() -> None:
    """Eight prompts of 50 tokens, four responses of 100 each, all at once: 200 steps, each with half of them."""
    config = rollout()
    held = cache_bytes_per_token(MODEL, config) * 100  # prompt and half of the response
    weights = rollout_weight_bytes(MODEL, config.layout, 2)
    stream, products = (weights + 16 * held) / 1e11, 2 * matmul_parameters(MODEL) * 16 / 1e12
    prompts = forward_flops(MODEL, [50]) * 8 / 1e12  # each read once: the prefix cache
    expected = 200 * (max(stream, products) + STEP_LATENCY_S) + prompts
    assert sum(timing.generation_s(MODEL, config, room(32 * held), RATES, 8, 50, 100)) == pytest.approx(expected)


def test_an_engine_on_several_nodes_reduces_between_them() -> None:
    """Two reductions a layer, of 64 elements of 2 bytes a token: 16 tokens in 200 steps, then 8 prompts of 50."""
    config, slow = rollout(tp=4), replace(RATES, per_node=2)
    held = cache_bytes_per_token(MODEL, config) * 100
    inside, none = timing.generation_s(MODEL, config, room(32 * held), RATES, 8, 50, 100)
    same, between = timing.generation_s(MODEL, config, room(32 * held), slow, 8, 50, 100)
    links = 2 * slow.inter  # of both devices of a node
    assert none == 0.0 and same == inside
    rows = 200 * (NODES_LATENCY_S + 1.5 * 128 * 16 / links) + NODES_LATENCY_S + 1.5 * 128 * 400 / links
    assert between == pytest.approx(2 * 4 * rows)
    crowded = replace(RATES, per_node=2, inter=1e12)
    assert timing.nodes_reduction_s(1e9, 4, crowded) == NODES_LATENCY_S + 1.5e9 / crowded.intra, "no faster than inside"


def test_a_small_cache_draws_in_turns() -> None:
    held = cache_bytes_per_token(MODEL, rollout()) * 100
    seconds = [sum(timing.generation_s(MODEL, rollout(), room(many * held), RATES, 8, 50, 100)) for many in (32, 8, 4)]
    # 3,200 tokens: of 8 at once 400 steps, of 4 at once 800
    assert seconds[1] - seconds[0] == pytest.approx(200 * STEP_LATENCY_S, rel=0.05)
    assert seconds[2] - seconds[1] == pytest.approx(400 * STEP_LATENCY_S, rel=0.05)
    assert sum(timing.generation_s(MODEL, rollout(max_num_seqs=8), room(32 * held), RATES, 8, 50, 100)) == seconds[1]


def test_experts_that_nobody_chose_are_not_read() -> None:
    """One sequence touches 2 of 8 experts; a hundred all of them."""
    config = rollout()
    experts = 4 * 8 * 3 * 64 * 32 * 2
    whole = rollout_weight_bytes(EXPERTS, config.layout, 2)
    assert timing.streamed_bytes(EXPERTS, config, 2, 1) == pytest.approx(whole - 0.75 * experts)
    assert timing.streamed_bytes(EXPERTS, config, 2, 100) == pytest.approx(whole)
    quantised = replace(config, quantization=Quantization.fp8_tensor)
    held = rollout_weight_bytes(EXPERTS, config.layout, 2, quantization=Quantization.fp8_tensor)
    assert whole / 2 < held < 0.7 * whole
    assert timing.streamed_bytes(EXPERTS, quantised, 2, 1) == pytest.approx(held - 0.75 * experts / 2)


def test_weights_cross_the_slow_link_only_where_a_node_lacks_them() -> None:
    alone, layout = role(), RolloutLayout()
    size = alone.sizes.num_parameters * alone.kernels.size
    rounds = ROUND_S * ROUND_IMBALANCE * size / (UPDATE_BUCKET_BYTES / 2)
    inside = size / RATES.intra
    separate = timing.weights_s(alone, size, layout, RATES, separate=True)
    assert separate.between == pytest.approx(ROUND_IMBALANCE * size / RATES.inter)
    assert separate.inside == pytest.approx(inside + rounds)
    colocated = timing.weights_s(alone, size, layout, RATES, separate=False)
    assert colocated.between == 0 and colocated.total == colocated.inside
    assert colocated.total == pytest.approx(inside + 2 * size / RATES.memory + rounds)
    twice = timing.weights_s(alone, size, RolloutLayout(dp=2), RATES, separate=True)
    assert twice.total == pytest.approx(separate.total), (
        "two replicas share what comes; who sends, sends as much to each"
    )
    slow = replace(RATES, accelerator=False)
    assert timing.weights_s(alone, 1, layout, slow, separate=True).total == 2 * alone.state(0).weights / RATES.memory


def test_what_moves_beside_other_work_by_hand() -> None:
    """The first minibatch's passes hide the optimizer's way back, the seconds of an update its way out."""
    state, link = role().state(0), HOST_LINK_GB_S * 1e9
    waits = role(overlap_offload=False)
    assert timing.offload_s(waits, RATES, 0.0) == pytest.approx(2 * (state.weights + state.optimizer) / link)
    passes = timing.pass_s(role(), RATES, WORK.sequences, train=True)
    slow = replace(RATES, host=state.optimizer / passes / 4)  # one way takes four times the seconds of the passes
    by_hand = 8 * passes * state.weights / state.optimizer + 4 * passes + 3 * passes
    assert timing.offload_s(role(), slow, 0.0) == pytest.approx(by_hand)
    assert timing.offload_s(role(), slow, passes) == pytest.approx(by_hand - passes)
    fast = replace(RATES, host=state.optimizer / passes * 4)
    all_hidden = timing.offload_s(role(), fast, 1.0)
    assert all_hidden == pytest.approx(2 * state.weights / fast.host), "weights are waited for"
    on_cpu = replace(RATES, accelerator=False)
    assert timing.offload_s(role(), on_cpu, 0.0) == timing.offload_s(waits, on_cpu, 0.0)


def test_moving_by_hand() -> None:
    assert timing.move_s(1e9, RATES) == 1 / HOST_LINK_GB_S
    assert timing.move_s(1e9, replace(RATES, accelerator=False)) == 1e9 / 5e10
