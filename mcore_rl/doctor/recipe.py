"""The check of a recipe: by plan it fits on what this machine really has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mcore_rl.config.cluster import ClusterConfig
from mcore_rl.doctor.checks import CLUSTER, RECIPE, Diagnosis, HealthCheck, Subject, problem_diagnosis
from mcore_rl.planning.plan import plan
from mcore_rl.planning.recipes import other_models, run_model
from mcore_rl.planning.tables import short_line


def measured_cluster(subject: Subject) -> ClusterConfig:
    """The cluster's yaml with the memory that a device of this node really has."""
    assert subject.cluster is not None
    if not subject.platform.is_accelerator:
        return subject.cluster
    there = round(subject.platform.memory_total_bytes / 2**30, 2)
    return replace(subject.cluster, gpu_memory_gib=min(there, subject.cluster.gpu_memory_gib))


def _recipe(subject: Subject, limit_s: float) -> Iterator[Diagnosis]:
    assert subject.recipe is not None
    run = subject.recipe
    planned = plan(run, run_model(run), measured_cluster(subject), other_models(run))
    problems = [str(each) for each in planned.violations]
    remedy = "mcore-rl plan --search shows layouts that fit"
    yield problem_diagnosis("recipe", problems, short_line(planned), "it fits, by plan", remedy)


CHECKS = (
    HealthCheck(
        name="recipe",
        about="the recipe fits on what a device really has, by plan",
        limit_s=60,
        run=_recipe,
        needs=(RECIPE, CLUSTER),
        on_each_node=False,
    ),
)
