"""The page is parsed strictly, and its numbers are held against the files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mcore_rl.tracking.page import LIGHT
from mcore_rl.tracking.report import write_comparison, write_report
from mcore_rl.tracking.samples import write_samples
from tests.house.source import ROOT
from tests.tracking.pages import numbers_under_the_pointer, of_class, parsed, words
from tests.tracking.recorded_run import record


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("runs") / "arithmetic")


@pytest.fixture(scope="module")
def root(run_dir: Path) -> ElementTree.Element:
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    return parsed(path)


def test_the_verdict_says_what_was_learned(root: ElementTree.Element) -> None:
    """20 and 120 of 200: Wilson's intervals by hand are [0.0657, 0.1494] and [0.5308, 0.6654]."""
    (verdict,) = of_class(root, "verdict")
    assert "good" in (verdict.get("class") or "")
    assert words(verdict) == (
        "arithmetic: validation accuracy went from 10.0% [6.6, 14.9] at step 0 to 60.0% [53.1, 66.5] at step 20 on 200 "
        "prompts: a significant gain of 50.0 points (exact sign test on the same 200 prompts: 100 better, 0 worse, "
        "p < 0.001)."
    )


def test_every_part_is_there(root: ElementTree.Element) -> None:
    assert [words(each) for each in root.iter("h2")] == [
        "Curves", "Time", "Samples, before and after", "Browse samples", "Notes and warnings"
    ]  # fmt: skip
    labels = [each.get("aria-label") for each in root.iter("svg")]
    assert labels[:3] == ["Validation accuracy", "Reward", "Parts of the reward"]
    assert {"Entropy", "Learning rate", "Seconds of each step", "rollout/logprob_diff_max"} <= set(labels)
    text = words(root)
    assert "Worth a look: 1 responses whose grader raised, hung or gave no number." in text
    assert "lr: 1.0e-06" in text and "versions.torch" in text


def test_the_curves_are_the_numbers_of_the_file(run_dir: Path, root: ElementTree.Element) -> None:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    charts = {
        each.get("aria-label"): [numbers for _, numbers in numbers_under_the_pointer(each)]
        for each in root.iter("svg")
        if each.get("data-hover")
    }
    rewards = [float(numbers["reward"].partition(" ")[0]) for numbers in charts["Reward"]]
    assert rewards == pytest.approx([row["reward/mean"] for row in rows[1:]], abs=5.1e-4)
    parts = charts["Parts of the reward"]
    assert {name: text.partition(" ")[0] for name, text in parts[-1].items()} == {"format": "1.000", "length": "-0.250"}
    assert len(parts) == len(rewards)
    assert not any((label or "").startswith("reward/part/") for label in charts), "once is enough"
    seconds = [float(numbers["in all"].removesuffix(" s")) for numbers in charts["Seconds of each step"]]
    assert seconds == pytest.approx([row["time/step"] for row in rows[1:]], abs=0.051)
    assert all(numbers["the rest"] == "0.400" for numbers in charts["Seconds of each step"])


def test_the_page_is_closed_as_html_demands(run_dir: Path, root: ElementTree.Element) -> None:
    class Nesting(HTMLParser):
        open: list[str] = []  # noqa: RUF012 - one page

        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag not in ("meta", "line", "rect", "circle", "polyline"):
                self.open.append(tag)

        def handle_endtag(self, tag: str) -> None:
            if self.open and self.open[-1] == tag:
                self.open.pop()

    nesting = Nesting()
    nesting.feed((run_dir / "report.html").read_text())
    assert nesting.open == []
    page = (run_dir / "report.html").read_text()
    assert all(word not in page for word in ("http:", "https:", "src=", "url("))
    ids = {each.get("id") for each in root.iter() if each.get("id")}
    links = [each.get("href") or "" for each in root.iter() if each.get("href")]
    assert len(links) == 5 and all(link[0] == "#" and link[1:] in ids for link in links), "none leads out of the page"


def test_fine_tuning_is_judged_by_its_loss(tmp_path: Path) -> None:
    path = tmp_path / "tuned"
    path.mkdir()
    steps = [{"step": 0, "sft/val_loss": 2.5}, *({"step": k, "sft/loss": 2.0 / k, "actor/lr": 1e-5} for k in (1, 2))]
    steps += [{"step": 3, "sft/loss": 0.75, "sft/val_loss": 0.5}, {"step": 4, "sft/loss": 0.5, "sft/val_loss": 0.625}]
    (path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in steps))
    (path / "environment.json").write_text('{"total_steps": 4}')
    root = parsed(write_report(path))
    (verdict,) = of_class(root, "verdict")
    assert "good" in (verdict.get("class") or "")
    assert words(verdict) == (
        "Validation loss: went from 2.500 nats per trained token at step 0 to 0.625 at step 4; the lowest was 0.500 at "
        "step 3."
    )
    first = next(root.iter("figure"))
    assert "Loss, per trained token" in words(first) and [words(each) for each in first.iter("li")] == [
        "loss",
        "val loss",
    ]
    last = numbers_under_the_pointer(next(first.iter("svg")))[-1]
    assert last == ("step 4", {"loss": "0.500", "val loss": "0.625"})
    assert "No validation samples" not in words(root)


def test_reward_models_are_judged_by_held_out_pairs_and_calibration(tmp_path: Path) -> None:
    path = tmp_path / "scores"
    path.mkdir()
    held_out = [{"loss": 0.75, "accuracy": 0.5, "ece": 0.25}, {"loss": 0.125, "accuracy": 0.9375, "ece": 0.031}]
    steps = [{f"reward/val_{name}": value for name, value in each.items()} for each in held_out]
    steps[1] |= {"reward/loss": 0.25, "reward/train_accuracy": 0.875, "actor/lr": 1e-5}
    lines = [json.dumps({"step": 2 * step, **each}) for step, each in enumerate(steps)]
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (path / "environment.json").write_text('{"total_steps": 2}')
    (path / "config.yaml").write_text("actor: {reward: {loss: bradley_terry}}\n")
    root = parsed(write_report(path))
    assert [words(each) for each in of_class(root, "verdict")] == [
        "Validation loss: went from 0.750 a pair or answer at step 0 to 0.125 at step 2; the lowest was 0.125 at step "
        "2.",
        "Held-out pairs or outcomes: scores agree with the labels of 50.0% of them at step 0, and of 93.8% at step 2.",
        "Calibration: the probabilities that scores stand for are 3.1% from what is so at step 2, in the mean.",
    ]
    text = words(root)
    assert "93.8%" in text and "from 50.0%: scores agree with the labels" in text
    assert "Reward model by bradley_terry" in text
    titles = [each.get("aria-label") for each in root.iter("svg")]
    assert {"Loss of scores", "Pairs or outcomes that scores tell", "Expected calibration error"} <= set(titles)
    assert "No validation samples" not in text and "Accuracy on training prompts" not in titles


def test_a_killed_run_has_curves_and_no_verdict(tmp_path: Path) -> None:
    path = record(tmp_path / "killed", total_steps=20, until=7)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "rew')
    root = parsed(write_report(path))
    (verdict,) = of_class(root, "verdict")
    assert words(verdict) == "No verdict: this run has not been recorded to its end."
    text = words(root)
    assert "killed: step 7 of 20 steps recorded" in text
    assert "+12.5 points so far" in text and "significant" not in text
    assert "Reward" in [each.get("aria-label") for each in root.iter("svg")]


@pytest.mark.parametrize("gone", ["metrics.jsonl", "validation", "environment.json", "config.yaml"])
def test_a_missing_part_is_said_to_be_missing(tmp_path: Path, gone: str) -> None:
    path = record(tmp_path / "run", total_steps=5)
    shutil.rmtree(path / gone) if (path / gone).is_dir() else (path / gone).unlink()
    text = words(parsed(write_report(path)))
    said = {
        "metrics.jsonl": "run: no step of 5 steps recorded",
        "validation": "No verdict: there are no validation samples.",
        "environment.json": "step 5 of an unknown number of steps recorded",
        "config.yaml": "config.yaml is missing.",
    }
    assert said[gone] in text


def test_no_change_and_a_loss_are_called_so(tmp_path: Path) -> None:
    for name, after, kind, said in (
        ("same", 11, "", "no significant change (gain of 2.5 points)"),
        ("loss", 0, "bad", "a significant loss of 25.0 points"),
    ):
        path = tmp_path / name
        path.mkdir()
        (path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 3}\n')
        (path / "environment.json").write_text('{"total_steps": 3}')
        for step, right in ((0, 10), (3, after)):
            rows = [{"data_source": "a/b", "prompt_id": k, "correct": k < right} for k in range(40)]
            write_samples(path, step, "validation", rows)
        (verdict,) = of_class(parsed(write_report(path)), "verdict")
        assert (verdict.get("class") or "").split()[1:] == kind.split()
        assert said in words(verdict)


def test_the_command_writes_reports_and_a_comparison(run_dir: Path, tmp_path: Path) -> None:
    other, out = record(tmp_path / "other", total_steps=8), tmp_path / "both.html"
    command = [sys.executable, "tools/report.py", str(run_dir), str(other), "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(run_dir / "report.html"), str(other / "report.html"), str(out)]
    root = parsed(out)
    reward = next(each for each in root.iter("figure") if "Reward" in words(each))
    assert [words(each) for each in reward.iter("li")] == ["arithmetic", "other"]
    rows = [words(row) for row in root.iter("tr")]
    assert "statefinishedfinished" in rows and "steps20 of 208 of 8" in rows
    assert [row[:16] for row in rows if "%" in row][1:] == ["arithmeticarithm", "otherarithmetic2"]
    failed = subprocess.run(
        [*command[:2], str(tmp_path / "none")], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert failed.returncode == 2
    assert "- run_dir=" in failed.stderr and "Traceback" not in failed.stderr


def test_a_run_has_one_colour_in_all_charts_of_a_comparison(tmp_path: Path) -> None:
    """The second run lacks what the first has, so that its lines have other places in the charts."""
    first, second = record(tmp_path / "first", total_steps=3), record(tmp_path / "second", total_steps=3)
    lines = [json.loads(line) for line in (second / "metrics.jsonl").read_text().splitlines()]
    kept = [{key: value for key, value in line.items() if key != "reward/part/format"} for line in lines]
    (second / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    root = parsed(write_comparison([first, second], tmp_path / "both.html"))
    hues = dict[str, set[int]]()
    for chart in (each for each in root.iter("svg") if each.get("data-hover")):
        for label, colour in json.loads(chart.get("data-hover") or "")["names"]:
            hues.setdefault(label.partition(":")[0], set()).add(int(colour[1:]) % len(LIGHT))
    assert hues == {"first": {0}, "second": {1}}


def test_a_comparison_tells_the_settings_that_differ(tmp_path: Path) -> None:
    runs = [record(tmp_path / name, total_steps=2) for name in ("first", "second")]
    for run, rate in zip(runs, ("1e-6", "3e-6"), strict=True):
        (run / "config.yaml").write_text(f"actor: {{optim: {{lr: {rate}}}, use_kl_loss: true}}\ndata: {{seed: 1}}\n")
    with (runs[1] / "config.yaml").open("a") as file:
        file.write("sft: {packed: true}\n")
    root = parsed(write_comparison(runs, tmp_path / "both.html"))
    rows = [[words(cell) for cell in row.iter("td")] for row in root.iter("tr")]
    assert [row for row in rows if row and row[0] in ("actor.optim.lr", "actor.use_kl_loss", "data.seed")] == [
        ["actor.optim.lr", "1e-6", "3e-6"]
    ]
    (fold,) = (each for each in root.iter("details") if "Keys that not all of them have" in words(each))
    assert "sft.packed-True" in words(fold)


def test_what_is_learned_is_drawn_over_hours_too(tmp_path: Path) -> None:
    """A run that takes twice as long is twice as far to the right."""
    runs = [record(tmp_path / name, total_steps=5) for name in ("first", "second")]
    slow = [json.loads(line) for line in (runs[1] / "metrics.jsonl").read_text().splitlines()]
    slow = [row | {"time/step": 7200.0} if "time/step" in row else row for row in slow]
    (runs[1] / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in slow))
    root = parsed(write_comparison(runs, tmp_path / "both.html"))
    hovers = {each.get("aria-label"): json.loads(each.get("data-hover") or "{}") for each in root.iter("svg")}
    reward = hovers["Reward, over hours"]
    accuracy = hovers["Validation accuracy, over hours"]
    assert (reward["unit"], accuracy["unit"]) == ("h", "h")
    assert [row[0] for row in reward["rows"] if row[3]] == [2.0, 4.0, 6.0, 8.0, 10.0]
    assert [row[0] for row in accuracy["rows"] if row[3]] == [0.0, 10.0]  # validated before the first step, and after 5
    assert "unit" not in hovers["Reward"]


def test_staleness_is_a_chart_only_where_something_was_stale(tmp_path: Path) -> None:
    for name, staleness, shown in (("turns", 0, False), ("ahead", 1, True)):
        path = record(tmp_path / name, total_steps=3)
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        made = [line | {"rollout/staleness_mean": staleness, "rollout/buffer": 0} for line in lines]
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in made))
        titles = {each.get("aria-label") for each in parsed(write_report(path)).iter("svg")}
        assert ("Staleness" in titles) == shown and "Groups drawn ahead" not in titles


def test_the_result_is_told_twice_above_the_curves(root: ElementTree.Element) -> None:
    """In large, and with its proof."""
    above = words(root).partition("Curves")[2].partition("Thin:")[0]
    assert above.count("10.0%") == 2 and above.count("60.0%") == 2
