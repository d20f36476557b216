from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from mcore_rl.tracking.console import COLUMNS, SUPERVISED_COLUMNS, ConsoleSink, LiveLine, duration, number
from mcore_rl.tracking.lanes import Lane, State
from mcore_rl.tracking.metrics import metric_of

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
STEP = {
    "reward/mean": 0.5128,
    "reward/accuracy": 0.41,
    "val/a/accuracy": 0.2,
    "val/b/accuracy": 0.4,
    "response/length_mean": 131.4,
    "actor/entropy": 0.8111,
    "actor/kl_k3": -1.234e-5,
    "actor/grad_norm": 0.52,
    "rollout/logprob_diff_mean": 2.5e-6,
    "perf/generated_tokens_per_s": 2534.0,
    "perf/mfu": 0.384,
    "time/step": 12.34,
}
VALUES = ["0.513", "41.0%", "30.0%", "131", "0.811", "-1.2e-05", "0.520", "2.5e-06", "2534", "38.4%", "12.3"]
MAX_WIDTH = 100  # columns of the widest row


def written(terminal: bool, steps: range, metrics: dict[str, float], total: int = 1000, width: int = MAX_WIDTH) -> str:
    out = io.StringIO()
    sink = ConsoleSink(Console(file=out, force_terminal=terminal, width=width, color_system=None), total)
    for step in steps:
        sink.now("generate", step, total)
        sink.log(step, metrics)
    sink.close()
    return out.getvalue()


def test_where_there_is_no_terminal_a_step_is_one_plain_line() -> None:
    begun, *lines = written(False, range(1, 3), STEP).splitlines()
    assert all(character.isprintable() for line in [begun, *lines] for character in line)
    assert begun == "0 s: generate 1/1,000" and len(lines) == 2
    assert lines[0].split(" | ")[:3] == ["step 1/1000", "reward 0.513", "acc 41.0%"]
    assert lines[1].startswith("step 2/1000 | ")
    assert [part.rpartition(" ")[2] for part in lines[0].split(" | ")[1:]] == VALUES


APART = {
    "rollout/staleness_max": 2.0,
    "rollout/buffer": 12.0,
    "perf/engines_idle_share": 0.25,
    "perf/trainer_idle_share": 0.5,
}


def test_a_run_on_separate_devices_says_who_was_idle_and_what_was_drawn_ahead() -> None:
    _, line = written(False, range(1, 2), {"reward/mean": 0.5} | APART).splitlines()
    assert line == ("step 1/1000 | reward 0.500 | stale 2.000 | buffer 12.0 | eng idle 25.0% | trn idle 50.0%")
    assert "stale" not in written(False, range(1, 2), STEP | {"rollout/staleness_max": 0.0}), (
        "of sync on shared devices"
    )


def test_the_live_line_counts_what_engines_do() -> None:
    lanes = [Lane(f"engine {k}") for k in range(3)]
    line = LiveLine(10, lambda: 0.0)
    assert "engine" not in line.words()
    line.lanes = lanes[:1]
    assert line.words().endswith("engine: 1 idle")
    line.lanes = lanes
    for lane in lanes[:2]:
        lane.begin(State.drawing, "call")
    line.finished(1, APART)
    assert line.words().endswith(
        "engines: 2 drawing, 1 idle · idle engines 25% and trainer 50%, buffer 12, staleness 2"
    )


def test_where_there_is_no_terminal_lines_say_what_happens_until_a_step_is_trained() -> None:
    """One when something begins, and one in half a minute of it; the seconds are since the beginning."""
    out = io.StringIO()
    clock = [100.0]
    sink = ConsoleSink(Console(file=out, force_terminal=False, color_system=None, width=40), 80, lambda: clock[0])

    def at(seconds: float, text: str, done: float | None = None, total: float | None = None) -> list[str]:
        clock[0] = 100.0 + seconds
        sink.now(text, done, total)
        lines = out.getvalue().splitlines()
        out.truncate(0)
        out.seek(0)
        return lines

    assert at(0, "starting Ray") == ["0 s: starting Ray"]
    assert at(75, "weights to the engines, which have more than a line") == [
        "1:15 min: weights to the engines, which have more than a line"
    ]
    assert at(80, "validating", 0, 64) == ["1:20 min: validating 0/64"]
    assert at(90, "validating", 16, 64) == []
    assert at(110, "validating", 32, 64) == ["1:50 min: validating 32/64, 30 s left"]
    sink.log(0, {"val/a/accuracy": 0.5})
    assert at(120, "drawing", 0, 8) == ["step 0/80 | val 50.0%", "2:00 min: step 1/80 · drawing 0/8"]
    sink.log(1, {"reward/mean": 0.5})
    assert at(500, "drawing", 0, 8) == ["step 1/80 | reward 0.500"]
    assert at(600, "log-probs") == []


def test_what_a_step_does_not_report_is_left_out_of_the_line() -> None:
    assert written(False, range(1), {"val/a/accuracy": 0.5}).endswith("\nstep 0/1000 | val 50.0%\n")


def test_on_a_terminal_a_step_is_a_row_under_its_heads() -> None:
    text = ESCAPES.sub("", written(True, range(1, 31), STEP))
    rows = [
        line for line in re.split(r"[\r\n]+", text) if "/1000 " in line and "·" not in line and "generate" not in line
    ]
    heads = [line for line in re.split(r"[\r\n]+", text) if "reward" in line]
    assert len(rows) == 30
    assert len(heads) == 2  # repeated so that it stays in sight
    assert rows[0].split() == ["1/1000", *VALUES]
    assert all(len(line) <= MAX_WIDTH for line in rows + heads)
    ends = [
        match.end()
        for match in re.finditer(r"step|reward|acc|val|length|entropy|KL|grad|logp diff|tok/s|MFU|seconds", heads[0])
    ]
    assert ends == [match.end() for match in re.finditer(r"\S+", rows[0])]


def test_a_reward_model_has_columns_of_its_own() -> None:
    trained = {"reward/loss": 0.25, "reward/train_accuracy": 0.875, "reward/margin": 1.5, "reward/val_ece": 0.0625}
    text = written(False, range(1, 2), trained)
    assert "loss 0.250 | acc 87.5% | margin 1.500 | val ECE 6.2%" in text
    assert "reward" not in text and "reward 1.5" in written(False, range(1, 2), {"reward/mean": 1.5})


@pytest.mark.parametrize("width", [120, 100, 90, 80, 60, 40])
@pytest.mark.parametrize("metrics", [STEP, {"sft/loss": 1.5, "sft/val_loss": 2.5, "actor/lr": 1e-6, "time/step": 2.0}])
def test_a_narrow_terminal_has_fewer_columns_and_none_of_them_is_cut(width: int, metrics: dict[str, float]) -> None:
    text = ESCAPES.sub("", written(True, range(1, 3), metrics, width=width))
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", text)]
    (head,) = (line for line in lines if re.match(r" *step +(reward|loss)", line))
    first, second = (line for line in lines if re.match(r" *\d+/1000 ", line))
    assert all(len(line) <= width for line in (head, first, second))
    words = head.replace("logp diff", "logp_diff").replace("val loss", "val_loss").split()
    every = [each for each, _, _ in (COLUMNS if metrics is STEP else SUPERVISED_COLUMNS)]
    assert words[0] == "step" and set(words[1:]) <= {each.replace(" ", "_") for each in every}
    if width >= MAX_WIDTH:
        assert len(words) == 1 + len(every)
    assert {"reward", "val", "seconds"} <= set(words) or metrics is not STEP or width < 60
    shown = [value for value in VALUES if value in first] if metrics is STEP else words[1:]
    assert len(shown) == len(words) - 1, "a number under every head, whole"


def test_heads_come_again_when_the_terminal_changes_its_width() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, color_system=None)
    sink = ConsoleSink(console, 10)
    for step, width in enumerate((100, 80, 80, 100), start=1):
        console.width = width
        sink.log(step, STEP)
    sink.close()
    heads = [line for line in re.split(r"[\r\n]+", ESCAPES.sub("", out.getvalue())) if "reward" in line]
    assert ["MFU" in line for line in heads] == [True, False, True]


def test_a_terminal_gets_its_cursor_back() -> None:
    text = written(True, range(1, 2), STEP)
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert text.endswith("\x1b[1A\x1b[2K")  # and the live line is gone


@pytest.mark.parametrize("size", [1.0, 1e-7, 123456.0, 9.9e14, float("nan")])
def test_no_row_is_wider_than_it_may(size: float) -> None:
    wide = {key: -size if "diff" in key or "kl" in key else size for key in STEP}
    wide |= {"reward/accuracy": 1.0, "val/a/accuracy": 1.0, "val/b/accuracy": 1.0, "perf/mfu": 0.999}
    text = ESCAPES.sub("", written(True, range(99_999, 100_000), wide, total=99_999))
    row = next(line for line in re.split(r"[\r\n]+", text) if line.startswith("99999/99999"))
    assert len(row.rstrip()) <= MAX_WIDTH
    assert len(row.split()) == 1 + len(COLUMNS)


def test_columns_are_metrics() -> None:
    assert all(metric_of(key.replace("{data_source}", "x")) for _, _, keys in COLUMNS for key in keys)


def test_the_live_line_says_progress_and_what_is_left() -> None:
    at = [0.0]
    line = LiveLine(10, lambda: at[0])
    line.now("loading the model", None, None)
    at[0] = 65
    assert line.words() == "loading the model 1:05 min"
    line.finished(0, {})
    line.now("generate", 0, 512)
    at[0] = 75
    line.now("generate", 128, 512)  # 10 s for 128, so 30 s for 384
    assert line.words() == "step 1/10 · generate 128/512, 30 s left"
    at[0] = 85  # 20 s since step 0
    line.finished(1, {})
    line.now("update actor", 1, 4)
    assert line.words() == "step 2/10 · update actor 1/4 · run: 3:00 min left"
    at[0] = 125
    line.finished(4, {})  # 60 s for 4 steps: 15 s each
    line.now("generate", 0, 512)  # of the next step: measured anew
    assert line.words() == "step 5/10 · generate 0/512 · run: 1:30 min left"
    at[0] = 135
    line.now("generate", 256, 512)
    at[0] = 145
    line.now("generate", 0, 512)  # less than before: once more, and measured anew
    at[0] = 147
    line.now("generate", 256, 512)  # 2 s for 256
    assert "generate 256/512, 2 s left" in line.words()
    line.finished(10, {})
    assert line.words().startswith("step 10/10")


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "0 s"), (59.6, "1:00 min"), (61, "1:01 min"), (3725, "1:02:05 h")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0, "", "0.000"), (0.4567, "share", "45.7%"), (12.34, "s", "12.3"), (999.4, "", "999"),
        (99_999.4, "", "99999"), (123_456, "", "123.5k"), (2.5e6, "", "2.5M"), (-3e9, "", "-3.0G"),
        (9.9e14, "", "9.9e+14"), (1e-6, "", "1.0e-06"), (None, "", "nan"), (float("nan"), "", "nan"),
        (float("inf"), "", "inf"), (float("-inf"), "", "-inf"),
    ],
)  # fmt: skip
def test_numbers_are_short(value: float | None, unit: str, text: str) -> None:
    assert number(value, unit) == text
    assert len(text) <= 8


def test_a_run_that_only_validates_has_no_number_of_steps() -> None:
    out = io.StringIO()
    sink = ConsoleSink(Console(file=out), 0)
    sink.log(40, {"time/step": 2.0})
    assert out.getvalue() == "step 40 | seconds 2.000\n"
