"""The parts of a run on a borrowed machine, in their order, each with its time."""

from __future__ import annotations

from benchmarks.gpu import Section

PACKAGE = "benchmarks.gpu_run"
# Limits add up to less than run.LIMIT_S; least: below it a part would be cut off before it has told anything.
PARTS = (
    Section("machine", "machine:facts", 35),
    Section("engine", "engine_alone:eager", 100, PACKAGE, least_s=40),
    Section("sft", "training:sft", 75, PACKAGE, least_s=40),
    Section("grpo", "training:grpo", 150, PACKAGE, least_s=60),
    Section("engine_killed", "training:engine_killed", 80, PACKAGE, least_s=60),
    Section("lora", "training:lora", 60, PACKAGE, least_s=45),
    Section("engine_graphs", "engine_alone:graphs", 45, PACKAGE, least_s=30),
)
