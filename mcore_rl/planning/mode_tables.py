"""Shows a comparison of modes: a table for the terminal, and plain values for a file."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.text import Text

from mcore_rl.planning.modes import ModeResult, ModesResult, rl_run
from mcore_rl.planning.simulation import ONE_STEP_OFF
from mcore_rl.planning.tables import rows_table, seconds_text
from mcore_rl.tracking.page import page, table, text

HEAD = (
    "mode",
    "nodes, engines/trainer",
    "step",
    "samples/s",
    "times sync",
    "engines idle",
    "trainer idle",
    "staleness",
)
STALENESS = "staleness: mean / most, versions of the weights; drained: they change when all that was begun is drawn"
LITTLE = 0.05  # a gain that is not worth another mode


def mode_tables(result: ModesResult) -> Group:
    """The table, why the fastest is so, its layouts as overrides, and the splits that were refused."""
    shown = rows_table(HEAD, [_cells(result, row) for row in result.rows])
    shown.columns[0].no_wrap = True
    mean = f"{result.lengths.mean:,.0f} of at most {result.lengths.longest:,} tokens"
    parts: list[Any] = [Text(f"simulated, with responses of {mean} on average"), shown]
    parts += [
        Text(line) for line in (STALENESS, *result.refused, why(result), result.best.candidate.plan.calibration.text)
    ]
    parts += [Text("its layouts, as overrides:"), Text(" ".join(_overrides(result.best)))]
    return Group(*parts)


def mode_page(title: str, result: ModesResult) -> str:
    """The same as one HTML page without external resources."""
    mean = f"{result.lengths.mean:,.0f} of at most {result.lengths.longest:,} tokens"
    lines = [STALENESS, *result.refused, result.best.candidate.plan.calibration.text]
    sections = [
        f"<h1>Modes of {text(title)}</h1>",
        f'<div class="verdict"><p>{text(why(result))}</p></div>',
        f'<p class="soft">Simulated, with responses of {mean} on average.</p>',
        table(HEAD, [_cells(result, row) for row in result.rows]),
        *(f"<p>{text(line)}</p>" for line in lines),
        f"<h2>Layouts of the fastest</h2><pre>{text(' '.join(_overrides(result.best)))}</pre>",
    ]
    return page(f"Modes: {title}", sections)


def _cells(result: ModesResult, row: ModeResult) -> list[str]:
    each = row.simulation
    nodes = f"{row.engine_nodes}/{row.trainer_nodes}" if row.engine_nodes else f"all {row.trainer_nodes}"
    idle = [f"{each.engines_idle:.0%}", f"{each.trainer_idle:.0%}"]
    ratio = f"{result.ratio(row):.2f}"
    staleness = f"{each.staleness_mean:.1f} / {each.staleness_max}"
    return [row.mode.name, nodes, seconds_text(each.step_s), f"{each.samples_per_s:.2f}", ratio, *idle, staleness]


def why(result: ModesResult) -> str:
    """Which mode pays, and why, in one line."""
    best = result.best
    base = result.base
    if result.ratio(best) < 1 + LITTLE:
        share = base.simulation.drawing
        return f"no mode pays: none is {LITTLE:.0%} faster than {base.mode.name}, of which drawing is {share:.0%}"
    overlap = [row for row in result.rows if row.mode == ONE_STEP_OFF]
    said = f"{best.mode.name} pays: {result.ratio(best):.2f} times {base.mode.name}"
    if overlap:
        fastest = max(map(result.ratio, overlap))
        said += f"; overlap alone (one_step_off) {fastest:.2f} times, since training is {base.simulation.training:.0%}"
        said += f" of a step of {base.mode.name}"
    engines = best.simulation.engines_idle
    trainer = best.simulation.trainer_idle
    if abs(engines - trainer) < LITTLE:
        said += "; engines and trainer wait for each other equally"
    else:
        said += f"; the {'engines' if engines > trainer else 'trainer'} wait{'' if engines > trainer else 's'} most"
    return said + _more_seqs(best)


def _more_seqs(best: ModeResult) -> str:
    """What lets more responses run together, where engines that never wait have room for more."""
    most = rl_run(best.candidate).rollout.max_num_seqs
    if best.simulation.engines_idle >= LITTLE or best.cache_seqs < most * (1 + LITTLE):
        return ""
    return f"; rollout.max_num_seqs={most} run together, and the cache of an engine holds {best.cache_seqs}"


def _overrides(row: ModeResult) -> list[str]:
    placement = "separate" if row.engine_nodes else "colocated"
    overrides = [f"trainer.placement={placement}", f"trainer.nnodes={row.trainer_nodes}"]
    if row.mode == ONE_STEP_OFF:
        overrides.append("trainer.mode=one_step_off")
    elif row.mode.max_staleness:
        overrides += ["trainer.mode=async", f"async.max_staleness={row.mode.max_staleness}"]
        overrides += [] if row.mode.in_flight else ["async.partial_rollout=false"]
    return [*overrides, *row.candidate.overrides]


def mode_values(result: ModesResult) -> dict[str, Any]:
    """The comparison as plain values for a JSON file; idle, drawing, training and publishing are shares of the time."""
    return {
        "mean_length": result.lengths.mean,
        "longest": result.lengths.longest,
        "refused": list(result.refused),
        "why": why(result),
        "rows": [
            {
                "mode": row.mode.name,
                "engine_nodes": row.engine_nodes,
                "trainer_nodes": row.trainer_nodes,
                "step_s": row.simulation.step_s,
                "samples_per_s": row.simulation.samples_per_s,
                "times_sync": result.ratio(row),
                "engines_idle": row.simulation.engines_idle,
                "trainer_idle": row.simulation.trainer_idle,
                "drawing": row.simulation.drawing,
                "training": row.simulation.training,
                "publishing": row.simulation.publishing,
                "staleness_mean": row.simulation.staleness_mean,
                "staleness_max": row.simulation.staleness_max,
                "overrides": _overrides(row),
            }
            for row in result.rows
        ],
    }
