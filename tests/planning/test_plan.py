"""Whole plans: of one model by hand, of what does not fit, and of both kinds of machines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mcore_rl.config.cluster import ClusterConfig, ResidualMemory
from mcore_rl.config.engine import LayerSpec, Precision, Recompute, SharePrompts
from mcore_rl.config.launch import load_cluster, load_recipe
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.roles import RouterReplay, TowerTraining
from mcore_rl.config.rollout import UPDATE_BUCKET_BYTES
from mcore_rl.config.run import RunConfig
from mcore_rl.config.sft import SftConfig
from mcore_rl.config.trainer import Placement
from mcore_rl.families.registry import model_of
from mcore_rl.ground.errors import ConfigError
from mcore_rl.planning.lengths import mean_lengths
from mcore_rl.planning.overheads import (
    COLLECTIVE_BYTES,
    CONTEXT_BYTES,
    CPU_CONTROLLER_BYTES,
    CPU_ENGINE_BYTES,
    CPU_ENGINE_RANK_BYTES,
    ENGINE_ACTOR_BYTES,
    GIB,
    HOST_PROCESS_BYTES,
    RAY_ACTOR_BYTES,
)
from mcore_rl.planning.peaks import LEAVING, leaves_behind
from mcore_rl.planning.plan import Phase, Place, Plan, plan
from mcore_rl.planning.recipes import run_model
from tests.support import models, published
from tests.support.settings import any_run

H100 = load_cluster("nvidia_h100")
CPU = ClusterConfig(name="laptop", cpus_per_node=4, host_memory_gib=8.0)
QWEN = model_of(published.FACTS["Qwen/Qwen2.5-7B-Instruct"])[1]
PARAMETERS = 7_615_616_512  # published: 7.61B


def run_of(**trainer: object) -> RunConfig:
    """GRPO of a 7B model on eight GPUs."""
    run = any_run()
    run.actor.parallel.tp = 2
    run.actor.recompute, run.actor.microbatch_tokens = Recompute.full, 8192
    run.rollout.tp, run.rollout.dp, run.rollout.n = 2, 4, 8
    run.trainer = replace(run.trainer, n_gpus_per_node=8, **trainer)  # type: ignore[arg-type]
    return run


def part(planned: Plan, phase: Phase, name: str, place: Place = Place.device) -> int:
    peak = planned.peak(phase, place)
    assert peak is not None
    (row,) = (row for row in peak.rows if row.part == name)
    return row.num_bytes


def test_bytes_by_hand() -> None:
    """tp=2 halves all but norms: 57 of 3,584 elements.  Four data-parallel ranks share the optimizer."""
    planned = plan(run_of(), QWEN, H100)
    held = (PARAMETERS - 57 * 3584) // 2 + 57 * 3584
    assert planned.fits and planned.num_parameters == PARAMETERS
    assert part(planned, Phase.update, "actor weights") == 2 * held
    assert part(planned, Phase.update, "actor gradients") == 4 * held
    assert part(planned, Phase.update, "actor optimizer") == 12 * held // 4
    # inputs of 28 layers, cut over the tensor ranks; logits, and what the loss and the last norm keep
    assert part(planned, Phase.update, "activations") == 28 * 8192 * 2 * 3584 // 2
    assert part(planned, Phase.update, "logits") == 8192 * (2 * 152064 // 2 + 100 + 2 * 2 * 3584 // 2)
    assert part(planned, Phase.rollout, "engine weights") == 2 * held
    # 28 layers, 2 of 4 heads of 128, keys and values, 2 bytes
    room = part(planned, Phase.rollout, "cache of keys and values")
    assert planned.concurrency == pytest.approx(room / (1024 * 28 * 2 * 2 * 128 * 2))
    assert part(planned, Phase.save, "Hugging Face exports", Place.disk) == 2 * PARAMETERS


def test_checkpoints_take_twelve_bytes_a_parameter_on_the_disk() -> None:
    planned = plan(run_of(save_freq=10, max_to_keep=2), QWEN, H100)
    norms = 57 * 3584  # which both tensor ranks write
    assert part(planned, Phase.save, "actor checkpoints", Place.disk) == 3 * 12 * (PARAMETERS + norms)
    held = part(planned, Phase.update, "actor optimizer")
    assert part(planned, Phase.save, "actor checkpoint", Place.host) == 8 * held


def test_a_critic_and_a_reference_take_their_place() -> None:
    run = run_of()
    alone = plan(run, QWEN, H100)
    run.actor.use_kl_loss = True
    run.algorithm.adv_estimator = "gae"
    run.critic = replace(run.critic, parallel=run.actor.parallel, recompute=Recompute.full, microbatch_tokens=8192)
    both = plan(run, QWEN, H100)
    # a value head in place of a projection of 152,064 rows, of which a rank had half
    less = 152064 * 3584 // 2 - 3584
    assert part(both, Phase.update, "critic weights") == part(both, Phase.update, "actor weights") - 2 * less
    assert part(both, Phase.rollout, "reference weights", Place.host) == 8 * part(both, Phase.update, "actor weights")
    assert {"values", "update_critic", "reference"} <= set(both.seconds)
    assert not {"values", "update_critic", "reference"} & set(alone.seconds)
    assert both.step_s > alone.step_s


def test_what_does_not_fit_is_told_with_phase_rank_and_numbers() -> None:
    run = run_of()
    run.actor.parallel.tp = run.rollout.tp = 1
    run.rollout.dp = 8
    run.actor.recompute, run.actor.microbatch_tokens = Recompute.none, 65536
    planned = plan(run, QWEN, H100)
    assert not planned.fits
    (wrong,) = (each for each in planned.violations if each.key == "actor.parallel")
    peak = planned.peak(Phase.update)
    assert peak is not None and not peak.fits
    assert wrong.value == "actor, rank 0"
    assert f"update needs {peak.num_bytes / GIB:.1f} of 79.6 GiB (device): activations" in wrong.problem


def test_gpus_that_idle_while_engines_generate_are_noted() -> None:
    run = run_of()
    run.rollout.dp = None
    whole = plan(run, QWEN, H100)
    assert whole.layout.endswith("rollout tp=2,dp=4,ep=1") and not whole.notes and run.rollout.dp is None
    run.rollout.dp = 1
    idle = plan(run, QWEN, H100)
    share = idle.seconds["generate"] / sum(idle.seconds.values())
    assert idle.notes == (f"6 of 8 GPUs idle in {share:.0%} of a step, in generate: rollout.dp=4 takes more",)
    assert idle.step_s > whole.step_s and share > whole.seconds["generate"] / whole.step_s
    run.trainer.placement = Placement.separate
    assert not plan(run, QWEN, H100).notes, "all that the engines have are at work"


def test_a_run_on_the_cpu_has_one_engine_unless_told_otherwise() -> None:
    run = run_of()
    run.rollout.tp, run.rollout.dp = 1, None
    planned = plan(run, models.dense(), replace(CPU, host_memory_gib=512.0))
    assert planned.layout.endswith("rollout tp=1,dp=1,ep=1") and not planned.notes


def test_the_worst_stage_is_named() -> None:
    run = run_of()
    run.actor.parallel.pp = 2
    planned = plan(run, QWEN, H100)
    peak = planned.peak(Phase.update)
    assert peak is not None and peak.where in ("actor, rank 0, stage 1 of 2", "actor, rank 4, stage 2 of 2")
    # the first stage keeps two microbatches, the last one and the logits
    assert part(planned, Phase.update, "activations") >= 14 * 8192 * 3584


def test_an_engine_without_room_for_a_sequence_is_refused() -> None:
    run = run_of()
    run.rollout.gpu_memory_utilization = 0.12
    (wrong,) = plan(run, QWEN, H100).violations
    assert wrong.key == "rollout.gpu_memory_utilization" and "one sequence of 1024 tokens" in wrong.problem


def test_while_weights_are_sent_engines_have_no_cache() -> None:
    run = run_of()
    run.rollout.gpu_memory_utilization = 0.9
    planned = plan(run, QWEN, H100)
    assert planned.fits
    (sync,) = (peak for peak in planned.peaks if peak.phase is Phase.sync)
    parts = {row.part: row.num_bytes for row in sync.rows}
    assert parts["engine weights"] == parts["actor weights"] and "cache of keys and values" not in parts


def highest_on_device(planned: Plan) -> int:
    return max(peak.num_bytes for peak in planned.peaks if peak.place is Place.device)


def test_the_optimizers_state_leaves_beside_an_update_where_other_phases_need_more() -> None:
    run = run_of()
    planned = plan(run, QWEN, H100)
    assert leaves_behind(planned.peaks)
    assert part(planned, Phase.sync, LEAVING) == part(planned, Phase.update, "actor optimizer")
    run.actor.overlap_offload = False
    alone = plan(run, QWEN, H100)
    assert not leaves_behind(alone.peaks)
    assert highest_on_device(alone) == highest_on_device(planned)
    sync, before = planned.peak(Phase.sync), alone.peak(Phase.sync)
    assert sync is not None and before is not None
    assert sync.num_bytes - before.num_bytes == part(planned, Phase.sync, LEAVING)
    assert alone.seconds["sync"] > planned.seconds["sync"]


def test_the_optimizers_state_is_waited_for_where_it_would_raise_the_peak() -> None:
    """An engine of one device and an actor of four: the optimizer's state beside both weights would be the most."""
    run = run_of()
    run.actor.parallel.tp, run.rollout.tp, run.rollout.dp = 4, 1, 8
    run.rollout.gpu_memory_utilization, run.actor.microbatch_tokens = 0.3, 1024
    planned = plan(run, QWEN, H100)
    sync = planned.peak(Phase.sync)
    assert planned.fits and sync is not None and not leaves_behind(planned.peaks)
    assert sync.num_bytes + part(planned, Phase.update, "actor optimizer") > highest_on_device(planned)


def test_engines_that_leave_no_room_for_the_trainers_processes_are_refused() -> None:
    run = run_of()
    run.rollout.gpu_memory_utilization = 0.999
    (wrong,) = plan(run, QWEN, H100).violations
    assert "rollout needs" in wrong.problem


def test_measured_memory_of_processes_takes_the_place_of_what_is_assumed_on_accelerators() -> None:
    run = run_of(save_freq=10)
    assumed = plan(run, QWEN, H100)
    mib = ResidualMemory(
        device_context_mib=500.0, device_collectives_mib=2000.0, host_trainer_mib=2500.0, host_engine_mib=4000.0,
        pinned_ratio=1.25,
    )  # fmt: skip
    measured = plan(run, QWEN, replace(H100, residuals=mib))
    assert part(assumed, Phase.update, "processes") == CONTEXT_BYTES + COLLECTIVE_BYTES
    assert part(measured, Phase.update, "processes, measured") == 2500 * 2**20
    assert part(measured, Phase.sync, "trainer processes, measured") == 2500 * 2**20
    graphs = part(assumed, Phase.sync, "engine graphs and overhead") - CONTEXT_BYTES - COLLECTIVE_BYTES
    assert part(measured, Phase.sync, "engine graphs and overhead") == 2500 * 2**20 + graphs
    assert part(assumed, Phase.rollout, "processes", Place.host) == 16 * HOST_PROCESS_BYTES
    trainers, engines = 8 * (2500 * 2**20 + RAY_ACTOR_BYTES), 8 * (4000 * 2**20 + ENGINE_ACTOR_BYTES)
    assert part(measured, Phase.rollout, "processes, measured", Place.host) == trainers + engines
    for name in ("actor weights, away", "actor optimizer, away", "actor checkpoint"):
        before, now = (part(each, Phase.save, name, Place.host) for each in (assumed, measured))
        assert now == 8 * round(1.25 * before / 8)


def test_a_part_is_called_measured_if_all_of_it_is() -> None:
    run = run_of()
    half = plan(run, QWEN, replace(H100, residuals=ResidualMemory(device_context_mib=500.0, host_trainer_mib=1.0)))
    assert part(half, Phase.update, "processes") == 500 * 2**20 + COLLECTIVE_BYTES
    assert part(half, Phase.rollout, "processes", Place.host) == 8 * (2**20 + RAY_ACTOR_BYTES + HOST_PROCESS_BYTES)


def test_an_engine_of_several_nodes_is_planned_with_its_reductions_between_them() -> None:
    run, wide = run_of(nnodes=2), replace(QWEN, num_attention_heads=32, num_query_groups=16)
    run.rollout.tp, run.rollout.dp = 8, 2
    inside = plan(run, wide, H100)
    run.rollout.tp, run.rollout.dp = 16, 1
    over = plan(run, wide, H100)
    assert part(over, Phase.rollout, "engine weights") < 0.52 * part(inside, Phase.rollout, "engine weights")
    assert over.fits and not inside.notes
    (said,) = over.notes
    assert "an engine of 16 devices is on 2 nodes" in said and "reductions between them" in said
    run.trainer.placement = Placement.separate
    assert plan(run, wide, H100).num_nodes == 4


def test_an_engine_of_parts_of_nodes_is_refused() -> None:
    run = run_of(nnodes=3)
    run.rollout.tp, run.rollout.dp = 12, 1
    wide = replace(QWEN, num_attention_heads=36, num_query_groups=12, ffn_hidden_size=18_432, vocab_size=192 * 792)
    for placement, nodes in ((Placement.colocated, "trainer.n_gpus_per_node=8"), (Placement.separate, "a node")):
        run.trainer.placement = placement
        with pytest.raises(ConfigError) as refused:
            plan(run, wide, H100)
        (only,) = refused.value.violations
        assert only.key == "rollout.tp" and nodes in only.problem and "nor takes whole nodes" in only.problem
        assert only.remedy == "Write a divisor or a multiple of 8"


def test_separate_engines_have_devices_of_their_own() -> None:
    run = run_of(placement=Placement.separate)
    run.rollout.dp, run.rollout.gpu_memory_utilization = 2, 0.9
    planned = plan(run, QWEN, H100)
    assert planned.fits and (planned.num_gpus, planned.num_nodes) == (12, 2)
    update, rollout = planned.peak(Phase.update), planned.peak(Phase.rollout)
    assert update is not None and rollout is not None
    assert not any("engine" in row.part for row in update.rows)
    assert not any("trainer" in row.part for row in rollout.rows)


def test_more_is_slower_and_larger() -> None:
    """Directions that no constant may turn around."""
    base = plan(run_of(), QWEN, H100)
    longer, wider = run_of(), run_of()
    longer.data.max_response_length = longer.rollout.max_response_length = 2048
    wider.actor.microbatch_tokens = 16384
    assert plan(longer, QWEN, H100).step_s > base.step_s
    more, less = (each.peak(Phase.update) for each in (plan(wider, QWEN, H100), base))
    assert more is not None and less is not None and more.num_bytes > less.num_bytes
    eager = run_of()
    eager.actor.recompute = Recompute.none
    faster = plan(eager, QWEN, H100)
    assert faster.seconds["update_actor"] < base.seconds["update_actor"]
    assert part(faster, Phase.update, "activations") > part(base, Phase.update, "activations")
    two_nodes = run_of(nnodes=2)
    two_nodes.rollout.dp = 8
    assert plan(two_nodes, QWEN, H100).step_s < base.step_s


def cpu_run() -> RunConfig:
    run = run_of()
    run.trainer.n_gpus_per_node = 2
    run.actor.parallel.tp = run.rollout.tp = 1
    run.rollout.dp, run.actor.precision, run.rollout.dtype = 2, Precision.float32, Precision.float32
    return run


def test_on_the_cpu_all_processes_share_the_machine() -> None:
    model = models.moe()
    planned = plan(cpu_run(), model, CPU)
    assert planned.fits
    peak = planned.peak(Phase.update)
    assert peak is not None and peak.capacity == 8 * GIB
    assert peak.num_bytes > 2 * 500 * 2**20 + 2 * GIB  # two processes, two engines with 1 GiB of cache each
    small = plan(cpu_run(), model, replace(CPU, host_memory_gib=2.0))
    assert not small.fits and "of 2.0 GiB" in small.violations[0].problem


def test_on_the_cpu_everybody_is_counted_and_gradients_are_of_who_trains() -> None:
    """An output of 101 rows, padded to 128, of 48 float32 numbers; two engines."""
    run = cpu_run()
    run.algorithm.adv_estimator, run.critic.precision = "gae", Precision.float32
    planned = plan(run, models.dense(), CPU)
    assert part(planned, Phase.update, "controller and Ray") == CPU_CONTROLLER_BYTES
    assert part(planned, Phase.update, "engine weights, packed besides") == 2 * 128 * 48 * 4
    weights = part(planned, Phase.update, "engine weights")
    assert weights < UPDATE_BUCKET_BYTES, "no buffer is longer than what comes through it"
    assert part(planned, Phase.update, "buffers of weight updates") == weights
    processes = part(planned, Phase.update, "engine processes")
    assert processes == 2 * (ENGINE_ACTOR_BYTES + CPU_ENGINE_BYTES + CPU_ENGINE_RANK_BYTES)
    for phase, trained in ((Phase.rollout, 0), (Phase.logprobs, 0), (Phase.update, 1)):
        peak = planned.peak(phase)
        assert peak is not None
        names = [row.part for row in peak.rows]
        assert sum(name.endswith("gradients") for name in names) == trained, phase
        assert {"actor optimizer", "critic optimizer"} <= set(names)
    run.trainer.placement = Placement.separate
    apart = plan(run, models.dense(), CPU).peak(Phase.rollout)
    assert apart is not None and sum(row.part.endswith("gradients") for row in apart.rows) == 2


def test_fine_tuning_is_planned_without_engines() -> None:
    config = SftConfig()
    config.actor.microbatch_tokens, config.data.max_length = 8192, 1024
    config.trainer.n_gpus_per_node = 8
    config.actor.parallel.tp = 2
    planned = plan(config, QWEN, H100)
    assert planned.fits and set(planned.seconds) == {"update_actor"} and planned.concurrency is None
    assert {peak.phase for peak in planned.peaks} == {Phase.update, Phase.save}
    assert part(planned, Phase.update, "actor weights") == part(
        plan(run_of(), QWEN, H100), Phase.update, "actor weights"
    )


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("actor.parallel.tp", lambda run: setattr(run.actor.parallel, "tp", 3)),
        ("rollout.tp", lambda run: setattr(run.rollout, "tp", 3)),
        ("trainer.n_gpus_per_node", lambda run: setattr(run.trainer, "n_gpus_per_node", 16)),
    ],
)
def test_layouts_of_nothing_are_refused(key: str, change: object) -> None:
    run = run_of()
    change(run)  # type: ignore[operator]
    with pytest.raises(ConfigError) as raised:
        plan(run, QWEN, H100)
    assert key in {violation.key for violation in raised.value.violations}


def test_sequences_longer_than_a_microbatch_are_noted() -> None:
    """Those that may never be met; a microbatch that the longest response alone does not fit into does not fit."""
    run = run_of()
    run.actor.microbatch_tokens = 513
    (said,) = plan(run, QWEN, H100).notes
    assert "1024 tokens" in said
    run.actor.microbatch_tokens = 512
    (violation,) = plan(run, QWEN, H100).violations
    assert (violation.key, violation.value) == ("actor.microbatch_tokens", 512)


def test_a_reward_model_takes_its_share_of_each_device() -> None:
    run = run_of()
    run.reward_model.enable, run.reward_model.gpu_memory_utilization = True, 0.25
    planned = plan(run, QWEN, H100)
    assert part(planned, Phase.rollout, "reward model") == int(0.25 * int(79.6 * GIB))
    run.rollout.gpu_memory_utilization = 0.75
    assert any("rollout needs" in each.problem for each in plan(run, QWEN, H100).violations)


def test_the_model_may_be_any() -> None:
    model: ModelConfig = models.gemma2()
    assert plan(cpu_run(), model, CPU).num_parameters > 0


def test_experts_that_are_repeated_are_counted_on_the_host() -> None:
    """Qwen3-30B-A3B: 48 layers of 8 choices, a byte each; eight processes of four data-parallel coordinates."""
    mixture, run = model_of(published.FACTS["Qwen/Qwen3-30B-A3B"])[1], run_of()
    run.actor.parallel.ep = 8
    of_step = run.data.train_batch_size * run.rollout.n * (512 + 512) * 48 * 8
    for mode, copies in ((RouterReplay.r2, 8 / 4 + 1), (RouterReplay.r3, 8 / 4 + 3)):
        run.actor.router_replay = mode
        assert part(plan(run, mixture, H100), Phase.rollout, "experts to repeat", Place.host) == of_step * copies
    run.actor.router_replay = RouterReplay.off
    host = plan(run, mixture, H100).peak(Phase.rollout, Place.host)
    assert host is not None and "experts to repeat" not in [row.part for row in host.rows]
    run.actor.router_replay = RouterReplay.r2
    with pytest.raises(ConfigError, match=r"actor\.router_replay=r2: the model is dense"):
        plan(run, QWEN, H100)


def test_a_plan_says_what_shared_prompts_save_or_why_they_save_nothing() -> None:
    run = run_of()
    run.actor.layer_spec, run.data.mean_response_length = LayerSpec.local, 100
    apart = plan(run, QWEN, H100)
    prompt = mean_lengths(run.data)[0]
    run.actor.share_prompts = SharePrompts.auto
    shared = plan(run, QWEN, H100)
    saved = (round(prompt) - 1) * 7 / 8 / (prompt + 100)
    assert shared.gains == (f"actor: prompts computed once for 8 samples save {saved:.0%} of the tokens",)
    assert 1 - saved - 0.02 < shared.seconds["update_actor"] / apart.seconds["update_actor"] < 1 - 0.8 * saved
    assert shared.seconds["generate"] == apart.seconds["generate"] and not apart.gains
    assert not shared.notes and not apart.notes
    run.actor.layer_spec = LayerSpec.auto
    (said,) = plan(run, QWEN, H100).notes
    assert not plan(run, QWEN, H100).gains
    assert "share_prompts=auto changes nothing, because Transformer Engine" in said


def test_pictures_take_their_place() -> None:
    """One picture of 1,024 tokens, 64 x 64 patches of 1,176 numbers, for each of 512 prompts; four at once."""
    run = load_recipe("qwen25_vl_7b_grpo")
    assert isinstance(run, RunConfig)
    planned = plan(run, run_model(run), H100)
    text = plan(replace(run, data=replace(run.data, image_key=None)), QWEN, H100)
    assert planned.num_parameters - text.num_parameters == 676_550_144
    assert part(planned, Phase.rollout, "pictures", Place.host) == 512 * 64 * 64 * 1176
    more = part(planned, Phase.update, "activations") - part(text, Phase.update, "activations")
    # Over two tensor ranks, two of four pictures each, in two microbatches of the first stage: 33 hidden states a patch
    # and what is around the blocks: pixels, the merger, the rotation.
    around = 2 * 1176 + 2 * 4 * 80 + (4 + 2 + 2 * 2) * 1280
    assert more == 2 * 2 * 64 * 64 * (2 * 1280 * 33 + around)
    assert part(planned, Phase.rollout, "engine, vision tower at work") > 0
    assert planned.seconds["generate"] > text.seconds["generate"]
    assert planned.seconds["update_actor"] > text.seconds["update_actor"]
    # A pass without gradient waits for the second stage all the same, which projects to the vocabulary.
    assert planned.seconds["logprobs"] == text.seconds["logprobs"]
    half = plan(replace(run, data=replace(run.data, mean_image_tokens=128)), run_model(run), H100)
    assert text.step_s < half.step_s < planned.step_s
    budget = plan(replace(run, actor=replace(run.actor, microbatch_patches=2 * 64 * 64)), run_model(run), H100)
    less = part(planned, Phase.update, "activations") - part(budget, Phase.update, "activations")
    assert less == pytest.approx(more / 2)
    frozen = plan(replace(run, actor=replace(run.actor, vision=TowerTraining.frozen)), run_model(run), H100)
    assert part(frozen, Phase.update, "activations") == part(text, Phase.update, "activations")
    kept, of_text = (part(each, Phase.rollout, "reference weights", Place.host) for each in (frozen, text))
    assert kept == pytest.approx(of_text, rel=1e-5), "a tower that stays is not kept twice"
    assert frozen.seconds["update_actor"] < planned.seconds["update_actor"]
