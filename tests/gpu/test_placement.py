"""Every tensor of the engine lives where an accelerator needs it: seen without one, in a pretended second memory."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from mcore_rl.config.engine import AuxLoss, Device, Recompute
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.config.role import Head
from mcore_rl.parallel import cpu
from mcore_rl.parallel.device import Platform, detect
from mcore_rl.parallel.groups import ProcessGroups, destroy_groups, init_groups
from mcore_rl.parallel.launch import Rank, run_ranks
from mcore_rl.parallel.layout import Layout
from mcore_rl.training.engine import Engine
from mcore_rl.training.sequences import forget_cached
from tests.gpu.two_memories import HOST, THERE, TwoMemories
from tests.invariance.problems import MODELS, Case, Problem
from tests.support import batches, full_weights
from tests.support.engine_runs import engine_config, global_batch, starting_weights
from tests.support.skips import ACCELERATOR

CASES = {
    "dense": Case(problem=Problem(model="tied")),
    "unpacked": Case(problem=Problem(model="qk_norm"), microbatch_tokens=None, microbatch_sequences=3),
    "critic": Case(problem=Problem(model="tied", head=Head.value)),
    "experts": Case(problem=Problem(model="moe", aux=AuxLoss.sequence, z=0.01), recompute=Recompute.full),
    "experts of a whole batch": Case(problem=Problem(model="moe", aux=AuxLoss.batch)),
    "dictated experts": Case(problem=Problem(model="moe", replay=True)),
    "latent attention": Case(problem=Problem(model="deepseek_v3")),
    "linear attention": Case(problem=Problem(model="qwen3_next")),
    "sinks": Case(problem=Problem(model="gpt_oss")),
}
# Patches that answer for the accelerator: the pretended memory does so itself.
LEFT_OUT = ("to cuda", "factories", "optimizer type names", "clip type names")


def look(case: Case, memories: TwoMemories, groups: ProcessGroups, platform: Platform, *, trainable: bool) -> list[str]:
    """Build, score, train, swap a snapshot; what a real accelerator would have refused."""
    model, head = MODELS[case.problem.model], case.problem.head
    config = engine_config(case, Device.cuda)
    engine = Engine(
        "actor", model, ParallelConfig(), config, groups, platform, head=head, trainable=trainable
    )  # fmt: skip
    misplaced = [
        f"{name} is on the host"
        for name, parameter in engine.models[0].named_parameters()
        if not memories.is_there(parameter)
    ]
    start, batch = starting_weights(case.problem), global_batch(case.problem)
    engine.load_weights(lambda models: full_weights.load_full(models, start))
    scores = engine.score(batch, record_routing=model.moe is not None)
    misplaced += [
        f"{field.name} of the scores is not on the host"
        for field in fields(scores)
        if getattr(scores, field.name) is not None and getattr(scores, field.name).device != HOST
    ]
    if trainable:
        loss = batches.value_loss if head is Head.value else batches.policy_loss
        engine.train_step(batch, loss, batches.denominators(batch), with_entropy=head is Head.lm)
    engine.snapshots.take("reference")
    engine.score(batch, snapshot="reference")
    return misplaced


def look_at_all(rank: Rank) -> dict[str, list[str]]:
    """One process: every case, trained and not."""
    for patch in cpu.PATCHES:
        if patch.name not in LEFT_OUT:
            patch.apply()
    torch.cuda.current_device = lambda: THERE  # type: ignore[assignment, return-value]
    platform = detect(Device.cpu)
    rank.init_process_group(platform)
    pretended = replace(platform, kind=Device.cuda, device_type=THERE.type)
    by_case = {}
    for name, case in CASES.items():
        for trainable in (False, True):
            memories = TwoMemories()
            forget_cached()  # what is kept is of the memories of the case before
            with memories:
                groups = init_groups(Layout.of(ParallelConfig(), 1), pretended, THERE, seed=1)
                problems = look(case, memories, groups, pretended, trainable=trainable)
                destroy_groups()
            by_case[f"{name}, {'trained' if trainable else 'scored'}"] = [*problems, *memories.mixed]
    return by_case


@pytest.mark.skipif(detect(Device.auto).is_accelerator, reason=f"{ACCELERATOR}there is a real one")
def test_nothing_that_meets_on_the_accelerator_is_left_on_the_host(processes: None) -> None:
    by_case = run_ranks(look_at_all, 1, threads_per_rank=1, timeout_s=300)[0]
    assert len(by_case) == 2 * len(CASES)
    problems = [f"{name}: {problem}" for name, all_of_it in by_case.items() for problem in all_of_it]
    assert not problems, "\n".join(problems)


def test_the_pretended_memory_sees_what_is_left_behind() -> None:
    memories = TwoMemories()
    with memories:
        there, here = torch.ones(3, device=THERE), torch.ones(3)
        assert there.device == THERE and here.device == HOST
        assert (there * 2 + torch.tensor(1.0)).device == THERE
        assert there.cpu().device == there.to("cpu").device == HOST
        assert here.to(THERE).device == torch.zeros_like(there).device == there.new_zeros(2).device == THERE
        assert there[torch.tensor([0, 1])].device == THERE  # torch moves an index itself
        here.copy_(there)
        assert not memories.mixed
        there + here
        torch.ones(3, out=torch.zeros(3), device=THERE)
        here[torch.zeros(1, dtype=torch.int64, device=THERE)]
        torch.where(there > 0, here, there)
    assert [line.partition(" at ")[0] for line in memories.mixed] == ["add", "ones", "__getitem__", "where"]
