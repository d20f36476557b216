"""Steps that were measured, here and by others, of ``measured_runs.yaml``: what plans are calibrated on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from mcore_rl.config.engine import LayerSpec
from mcore_rl.config.model import ModelConfig, MoeConfig

FILE = Path(__file__).with_suffix(".yaml")
WITHIN = 0.25  # of what was measured, for every part that counts


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A step of reinforcement learning.

    name: of the model, the devices and the program with its release.
    source: where the seconds were read.
    device: a word of its devices' name.
    cluster: a name of launch/clusters, and overrides of it.
    billions, experts: parameters of the model, and whether it has experts.
    fused: whether it is planned with Transformer Engine's layers.
    settings: overrides of ``mcore-rl train`` that say the same as the run's own.
    prompt, response: mean tokens.
    seconds: measured, by part: ``generate``, ``logprobs`` (all passes without a gradient), ``update``, ``sync`` (the
    weight update, and moves between device and host) and ``step``.
    out, why: parts that are not compared, and the reason.  Never compared is ``sync``, which is another program's.
    note: what was taken from elsewhere, or is not the run's own.
    """

    name: str
    source: str
    device: str
    cluster: tuple[str, ...]
    billions: float
    experts: bool
    fused: bool
    settings: str
    prompt: int
    response: int
    seconds: Mapping[str, float]
    out: tuple[str, ...]
    why: str
    note: str

    @property
    def words(self) -> list[str]:
        """The overrides of ``mcore-rl train``, the last of a key; the plan takes half of the longest prompt as mean."""
        lengths = [f"data.max_prompt_length={2 * self.prompt}", f"data.mean_response_length={self.response}"]
        words = [*self.settings.split(), *lengths]
        return list({word.partition("=")[0]: word for word in words}.values())

    @property
    def counted(self) -> dict[str, float]:
        """Seconds by the parts that are compared; ``step`` is without ``sync``."""
        compared = {part: each for part, each in self.seconds.items() if part not in ("sync", *self.out)}
        if "step" in compared:
            compared["step"] -= self.seconds.get("sync", 0.0)
        return compared


@dataclass(frozen=True, kw_only=True)
class MeasuredUpdate:
    """An update on one device, all of whose sequences are kept for backward.

    mean: tokens of a sequence.  mfu: measured.
    """

    name: str
    source: str
    cluster: str
    model: ModelConfig
    layer_spec: LayerSpec
    sequences: int
    mean: float
    microbatch_tokens: int
    mfu: float


@dataclass(frozen=True, kw_only=True)
class MeasuredGain:
    """Two runs of the same prompts on the same devices, one after another and one step off.

    run: of the first, by its name.  engine_nodes: of the second; the trainer has the other nodes.
    sync_s, other_s: seconds of their steps.
    """

    name: str
    source: str
    run: str
    engine_nodes: int
    sync_s: float
    other_s: float


@cache
def measured_runs() -> tuple[MeasuredRun, ...]:
    """All steps of reinforcement learning."""
    table = _table()
    return tuple(_run(row, table) for row in table["runs"])


@cache
def measured_updates() -> tuple[MeasuredUpdate, ...]:
    """All updates on one device."""
    table = _table()
    return tuple(_update(row, table) for row in table["updates"])


@cache
def measured_gains() -> tuple[MeasuredGain, ...]:
    """All pairs of runs in two modes."""
    table = _table()
    return tuple(MeasuredGain(**(row | {"source": table["sources"][row["source"]]})) for row in table["gains"])


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return table


def _run(row: dict[str, Any], table: Mapping[str, Any]) -> MeasuredRun:
    values: dict[str, Any] = {"experts": False, "fused": True, "why": "", "note": "", **row}
    common = [table["settings"][name] for name in values.pop("common")]
    values["settings"] = " ".join([*common, row["settings"]])
    values["source"] = table["sources"].get(row["source"], row["source"])
    values["device"] = row["cluster"].upper()
    values["cluster"] = tuple(table["clusters"][row["cluster"]])
    values["note"] = table["notes"].get(values["note"], values["note"])
    values["out"] = tuple(row.get("out", ()))
    return MeasuredRun(**values)


def _update(row: dict[str, Any], table: Mapping[str, Any]) -> MeasuredUpdate:
    row = dict(row)
    moe = row.pop("moe", None)
    row["model"] = ModelConfig(**row["model"], moe=None if moe is None else MoeConfig(**moe))
    row["layer_spec"] = LayerSpec(row["layer_spec"])
    (row["cluster"],) = table["clusters"][row["cluster"]]
    return MeasuredUpdate(**row)
