"""The page is parsed strictly, its numbers are held against the files, and a browser opens it where there is one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mcore_rl.tracking.report import write_report
from mcore_rl.tracking.samples import write_samples
from tests.house.source import ROOT
from tests.tracking.recorded_run import record

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
# Moves the pointer over the middle of every chart, and writes down what a person would see.
VISITOR = """
const said = [];
for (const svg of document.querySelectorAll("svg")) {
  svg.scrollIntoView();
  const box = svg.getBoundingClientRect(), at = {clientX: box.left + box.width / 2, clientY: box.top + 5};
  svg.dispatchEvent(new PointerEvent("pointermove", at));
  const tip = document.getElementById("tip"), place = tip.getBoundingClientRect();
  const inside = place.left >= 0 && place.right <= window.innerWidth && place.width > 0;
  said.push([svg.getAttribute("aria-label"), tip.hidden ? null : tip.textContent, inside]);
  svg.dispatchEvent(new PointerEvent("pointerleave"));
}
const wide = document.documentElement.scrollWidth > window.innerWidth;
const colour = getComputedStyle(document.body).backgroundColor;
document.body.textContent = "SEEN" + JSON.stringify({said, wide, colour, hidden: tip.hidden}) + "SEEN";
"""


def parsed(path: Path) -> ElementTree.Element:
    """The page, by a parser that forgives nothing."""
    return ElementTree.fromstring(path.read_bytes())


def words(element: ElementTree.Element) -> str:
    return " ".join("".join(element.itertext()).split())


def of_class(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [each for each in root.iter() if name in (each.get("class") or "").split()]


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
        "Validation accuracy", "Curves", "Time", "Samples, before and after", "Notes and warnings"
    ]  # fmt: skip
    labels = [each.get("aria-label") for each in root.iter("svg")]
    assert labels[:3] == ["Validation accuracy", "Reward", "Parts of the reward"]
    assert {"Entropy", "Learning rate", "Seconds of each step", "rollout/logprob_diff_max"} <= set(labels)
    text = words(root)
    assert "Worth a look: 1 responses whose grader raised, hung or gave no number." in text
    assert "lr: 1.0e-06" in text and "versions.torch" in text


def test_the_curves_are_the_numbers_of_the_file(run_dir: Path, root: ElementTree.Element) -> None:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    charts = {each.get("aria-label"): json.loads(each.get("data-hover") or "") for each in root.iter("svg")}
    rewards = [float(text.rpartition(" ")[2]) for _, text in charts["Reward"]]
    assert rewards == pytest.approx([row["reward/mean"] for row in rows[1:]], abs=5.1e-4)
    parts = [text.splitlines()[1:] for _, text in charts["Parts of the reward"]]
    assert parts[-1] == ["format: 1.000", "length: -0.250"] and len(parts) == len(rewards)
    assert not any((label or "").startswith("reward/part/") for label in charts), "once is enough"
    seconds = [float(re.findall(r"([\d.]+) s", text)[0]) for _, text in charts["Seconds of each step"]]
    assert seconds == pytest.approx([row["time/step"] for row in rows[1:]], abs=0.051)
    assert all("controller: 0.400" in text for _, text in charts["Seconds of each step"])


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
    assert all(word not in (run_dir / "report.html").read_text() for word in ("http:", "https:", "src=", "href="))


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
    hover = json.loads(next(first.iter("svg")).get("data-hover") or "")
    assert [text for _, text in hover][-1] == "step 4\nloss: 0.500\nval loss: 0.625"
    assert "No validation samples" not in words(root)


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
    assert [words(row)[:16] for row in root.iter("tr")][1:] == ["arithmeticarithm", "otherarithmetic2"]
    failed = subprocess.run(
        [*command[:2], str(tmp_path / "none")], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert failed.returncode == 2
    assert "- run_dir=" in failed.stderr and "Traceback" not in failed.stderr


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.parametrize("width", [500, 1280])  # 500 is the narrowest window that Chromium opens
def test_a_browser_shows_every_chart_and_the_numbers_under_the_pointer(
    run_dir: Path, root: ElementTree.Element, tmp_path: Path, width: int
) -> None:
    copy = tmp_path / "report.html"
    page = (run_dir / "report.html").read_text().replace("<details>", '<details open="open">')
    copy.write_text(page.replace("</body>", f"<script>{VISITOR}</script></body>"))
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += [f"--window-size={width},900", "--dump-dom", copy.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    seen = json.loads(dom.split("SEEN")[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))
    assert [label for label, _, _ in seen["said"]] == [each.get("aria-label") for each in root.iter("svg")]
    hovers = [[text for _, text in json.loads(each.get("data-hover") or "")] for each in root.iter("svg")]
    for (_, said, inside), texts in zip(seen["said"], hovers, strict=True):
        assert said in texts[len(texts) // 2 - 1 : len(texts) // 2 + 1]  # the pointer is in the middle
        assert inside
    assert not seen["wide"], "the page scrolls sideways"
    assert seen["hidden"]
