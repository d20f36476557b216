"""What a person sees: Chromium opens the page from its file, wide and narrow; mouse and keys are real input events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mcore_rl.config.launch import load_cluster
from mcore_rl.config.run import RunConfig
from mcore_rl.planning.plan import plan
from mcore_rl.planning.tables import plan_page
from mcore_rl.tracking.report import write_comparison, write_report
from mcore_rl.tracking.samples import thumbnail_file, write_samples
from tests.support import models
from tests.support.browser import Browser, browser, needs_chromium
from tests.support.pictures import encoded
from tests.tracking.pages import numbers_under_the_pointer, parsed
from tests.tracking.recorded_run import record

pytestmark = [needs_chromium, pytest.mark.tier("ci")]
WIDTHS = (360, 1280)
HOSTILE = (
    "<script>document.title = 'run'</script>",
    "</script ><script >document.title = 'run'</script>",
    "<img src=x onerror=\"document.title = 'run'\">",
    "<svg onload=\"document.title = 'run'\"></svg>",
    "<!-- <script> \" ' & &lt;b&gt; ]]> {{ }} <style>body { display: none }</style>",
    "<a href=\"javascript:document.title = 'run'\">here</a><meta http-equiv=refresh content=0>",
)
HEIGHT = "document.documentElement.scrollHeight"
SIDEWAYS = "document.documentElement.scrollWidth > window.innerWidth"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as started:
        yield started


def rollouts(step: int) -> list[dict[str, Any]]:
    """Three answers to each of four prompts; the score tells step, prompt and answer."""
    return [
        {
            "data_source": "sums", "prompt_id": f"p{prompt}", "prompt": f"What is {prompt} + 1?",
            "response": f"answer {answer} to {prompt} at {step}", "score": step + prompt / 10 + answer / 100,
            "correct": answer == 2, "ground_truth": str(prompt + 1), "num_tokens": 5 + answer,
            "finish": "length" if answer == 0 else "stop",
        }
        for prompt in range(4)
        for answer in range(3)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = record(tmp_path_factory.mktemp("runs") / "arithmetic")
    for step in (1, 2, 3):
        write_samples(path, step, "rollouts", rollouts(step))
    write_report(path)
    return path


SMALLEST = """Math.min(...[...document.querySelectorAll('svg text')].map(each => {
  const svg = each.ownerSVGElement, box = svg.viewBox.baseVal;
  const scale = box && box.width ? svg.getBoundingClientRect().width / box.width : 1;
  return parseFloat(getComputedStyle(each).fontSize) * (scale || 1);
}))"""


@pytest.mark.parametrize("width", [420, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_label_can_be_read(chromium: Browser, run_dir: Path, width: int, scheme: str, tmp_path: Path) -> None:
    """Of a run, of a comparison and of a plan; and no page is wider than its window."""
    other, both, planned = record(tmp_path / "other", total_steps=8), tmp_path / "both.html", tmp_path / "plan.html"
    write_comparison([run_dir, other], both)
    run = RunConfig()
    run.actor.microbatch_tokens = 8192
    planned.write_text(plan_page(plan(run, models.moe(), load_cluster("nvidia_h100"))), encoding="utf-8")
    for page in (run_dir / "report.html", both, planned):
        chromium.open(page.as_uri(), width)
        chromium.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        chromium.ask("document.querySelectorAll('details').forEach(each => each.open = true)")
        texts = chromium.ask("document.querySelectorAll('svg text').length")
        assert not texts or chromium.ask(SMALLEST) >= 10, page.name
        assert not chromium.ask(SIDEWAYS) and chromium.complaints() == [], page.name


@pytest.mark.parametrize("width", WIDTHS)
def test_every_chart_shows_its_numbers_under_the_pointer(chromium: Browser, run_dir: Path, width: int) -> None:
    chromium.open((run_dir / "report.html").as_uri(), width)
    chromium.ask("document.querySelectorAll('details').forEach(each => each.open = true)")
    charts = [each for each in parsed(run_dir / "report.html").iter("svg") if each.get("data-hover")]
    assert len(charts) > 15
    for at, chart in enumerate(charts):
        rows = numbers_under_the_pointer(chart)
        svg = f"document.querySelectorAll('svg[data-hover]')[{at}]"
        chromium.ask(f"{svg}.scrollIntoView({{block: 'center'}})")
        left, top, wide, high = chromium.ask(
            f"(b => [b.left, b.top, b.width, b.height])({svg}.getBoundingClientRect())"
        )
        spec = json.loads(chart.get("data-hover") or "")
        middle = spec["rows"][len(rows) // 2]
        place = spec["start"] + ((middle[0] + middle[1]) / 2 - spec["low"]) * spec["apart"]
        chromium.move(left + place * wide / 420, top + high / 2)
        steps, numbers = rows[len(rows) // 2]
        told = chromium.ask("[...document.querySelectorAll('#tip b, #tip span')].map(each => each.textContent)")
        assert told == [steps, *(f"{label}: {text}" for label, text in numbers.items())], chart.get("aria-label")
        inside = "(b => b.left >= 0 && b.top >= 0 && b.right <= innerWidth && b.bottom <= innerHeight)"
        assert chromium.ask(f"{inside}(document.getElementById('tip').getBoundingClientRect())")
    assert not chromium.ask(SIDEWAYS), "the page scrolls sideways"
    assert chromium.complaints() == [] and len(chromium.requests()) == 1


def test_steps_and_hours_are_not_shown_together(chromium: Browser, tmp_path: Path) -> None:
    """After 2 hours is not step 2."""
    path = record(tmp_path / "slow", total_steps=5)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    slow = [row | {"time/step": 3600.0} if "time/step" in row else row for row in rows]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in slow))
    chromium.open(write_report(path).as_uri())
    chromium.ask("document.querySelectorAll('details').forEach(each => each.open = true)")
    seen = "[...document.querySelectorAll('.rule.seen')].map(each => each.ownerSVGElement.getAttribute('aria-label'))"
    for chart, other in (("Reward, over hours", "Reward"), ("Reward", "Reward, over hours")):
        chromium.ask(f"document.querySelector('svg[aria-label=\"{chart}\"]').focus({{preventScroll: true}})")
        chromium.press("ArrowRight")
        together = chromium.ask(seen)
        assert chart in together and len(together) > 1 and other not in together
        assert chromium.ask("document.querySelector('#tip b').textContent") == (
            "step 1" if chart == "Reward" else "after 1 h"
        )


def test_charts_show_the_same_step_together_and_keys_move_it(chromium: Browser, run_dir: Path) -> None:
    chromium.open((run_dir / "report.html").as_uri())
    before = chromium.ask(HEIGHT)
    chromium.ask("document.querySelector('svg[aria-label=Entropy]').focus({preventScroll: true})")
    for _ in range(7):
        chromium.press("ArrowRight")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert chromium.ask("document.querySelector('#tip b').textContent") == "step 7"
    reward = chromium.ask(
        "document.querySelector('svg[aria-label=Reward]').closest('figure').querySelector('output').textContent"
    )
    assert float(reward.partition(" ")[0]) == pytest.approx(rows[7]["reward/mean"], abs=5.1e-4)
    assert chromium.ask("document.querySelectorAll('.rule.seen').length") > 5
    assert chromium.ask(HEIGHT) == before, "nothing moves under the pointer"
    chromium.press("Escape")
    assert chromium.ask("document.getElementById('tip').hidden && !document.querySelectorAll('.rule.seen').length")


def cards(chromium: Browser) -> list[str]:
    return list(
        chromium.ask("[...document.querySelectorAll('.sample > pre:last-child')].map(each => each.textContent)")
    )


def choose(chromium: Browser, label: str, value: str) -> None:
    chromium.ask(
        f"(() => {{ const found = [...document.querySelectorAll('#sample-browser label')]"
        f".find(each => each.textContent.startsWith({json.dumps(label)})).querySelector('select, input');"
        f"found.value = {json.dumps(value)}; found.dispatchEvent(new Event('change')); }})()"
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_samples_by_step_by_score_and_one_prompt_over_the_steps(chromium: Browser, run_dir: Path, width: int) -> None:
    chromium.open((run_dir / "report.html").as_uri(), width)
    choose(chromium, "samples of", "1")
    in_order = sorted(rollouts(3), key=lambda row: -row["score"])
    assert cards(chromium) == [row["response"] for row in in_order[:8]], "the newest step, the highest score first"
    choose(chromium, "order", "low")
    assert cards(chromium) == [row["response"] for row in in_order[::-1][:8]]
    choose(chromium, "step 3", "0")
    assert cards(chromium)[0] == "answer 0 to 0 at 1"
    choose(chromium, "show", "right")
    assert cards(chromium) == [f"answer 2 to {prompt} at 1" for prompt in range(4)]
    choose(chromium, "text", "what is 2")
    assert cards(chromium) == ["answer 2 to 2 at 1"]
    assert not chromium.ask(SIDEWAYS)
    chromium.click(".sample button")
    shown = [f"answer {answer} to 2 at {step}" for step in (1, 3) for answer in range(3)]
    assert cards(chromium) == shown, "the same prompt, at the first step and at the last"
    choose(chromium, "after", "2")
    assert cards(chromium) == shown[:3] + [f"answer {answer} to 2 at 2" for answer in range(3)]
    assert not chromium.ask(SIDEWAYS) and chromium.complaints() == []


@pytest.mark.parametrize("text", HOSTILE)
def test_what_a_model_writes_is_shown_and_never_run(chromium: Browser, tmp_path: Path, text: str) -> None:
    """As prompt, answer, gold, source and error, in rollouts and validations, and in the names of metrics."""
    row = {
        "data_source": text, "prompt_id": text, "prompt": text, "response": text, "score": 1.0, "correct": True,
        "ground_truth": text, "num_tokens": 3, "finish": "stop", "error": text,
    }  # fmt: skip
    path = tmp_path / "hostile"
    path.mkdir()
    steps = [{"step": 0}, {"step": 1, f"reward/part/{text}": 0.5, "reward/part/b": 1.0, "time/step": 1.0}]
    (path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in steps))
    (path / "config.yaml").write_text(json.dumps({"model": {"path": text}, "data": {"train_files": [text]}}))
    for step, kind in ((0, "validation"), (1, "validation"), (1, "rollouts")):
        write_samples(path, step, kind, [row])  # type: ignore[arg-type]
    chromium.open(write_report(path).as_uri())
    assert cards(chromium) == [text]
    assert chromium.ask("[...document.querySelectorAll('.sides pre')].map(each => each.textContent)") == [text, text]
    choose(chromium, "samples of", "1")
    assert cards(chromium) == [text]
    assert chromium.ask("document.title") == "hostile: what was learned"
    assert (
        chromium.ask(
            "document.querySelectorAll('main img, main a, main style, main script:not([type]), main meta').length"
        )
        == 0
    )
    assert chromium.complaints() == [] and len(chromium.requests()) == 1


@pytest.mark.parametrize("width", WIDTHS)
def test_the_pictures_of_a_prompt_are_seen(chromium: Browser, tmp_path: Path, width: int) -> None:
    path = record(tmp_path / "seen")
    keys = [f"{number:064x}" for number in range(3)]
    (path / "media").mkdir()
    for key, colour, size in zip(keys[:2], ("red", "blue"), ((256, 128), (56, 84)), strict=True):
        thumbnail_file(path, key).write_bytes(encoded(Image.new("RGB", size, colour), "WEBP"))
    images = [
        {"sha256": key, "source": f"/somewhere/{HOSTILE[2] if place else 'a.png'}"} for place, key in enumerate(keys)
    ]
    write_samples(path, 7, "rollouts", [rollouts(7)[0] | {"images": images}])
    write_report(path)
    chromium.open((path / "report.html").as_uri(), width)
    choose(chromium, "samples of", "1")
    chromium.ask("Promise.all([...document.querySelectorAll('.album img')].map(each => each.decode()))")
    seen = chromium.ask("[...document.querySelectorAll('.album img')].map(each => [each.naturalWidth, each.alt])")
    name = HOSTILE[2]
    assert seen == [[256, "picture 1 of 3: a.png"], [56, f"picture 2 of 3: {name}"]]
    told = chromium.ask("document.querySelector('.album span').textContent")
    assert told == f"picture 3 of 3: {name}, not on this page"
    assert chromium.ask("document.title") != "run" and not chromium.ask(SIDEWAYS)
    assert chromium.complaints() == []


def test_the_policy_stops_a_script_that_got_into_the_page(chromium: Browser, run_dir: Path, tmp_path: Path) -> None:
    """The last line of defence, shown by a page that is made wrong on purpose."""
    copy, wrong = (
        tmp_path / "report.html",
        "<script>document.title = 'run'</script><img src='x' onerror='document.title = 1'/>",
    )
    copy.write_text((run_dir / "report.html").read_text().replace("<main", f"{wrong}<main"))
    chromium.open(copy.as_uri())
    assert chromium.ask("document.title") == "arithmetic: what was learned"
    assert sum("Content Security Policy" in each for each in chromium.complaints()) >= 2
    assert chromium.ask("document.querySelectorAll('.sample').length") > 0, "the page's own scripts run"


def test_an_agents_episode_is_a_conversation_with_authors_in_colours(chromium: Browser, tmp_path: Path) -> None:
    path = record(tmp_path / "agents")

    def said(author: str, text: str, trained: bool, **more: Any) -> dict[str, Any]:
        plain = {"num_tokens": 3, "reward": None, "versions": [], "tool_s": 0.0}
        return {"author": author, "text": text, "trained": trained} | plain | more

    turns = [
        said("prompt", "", False),
        said("model", "let me add", True, reward=0.25, versions=[6, 7]),
        said("tool", HOSTILE[0], False, tool_s=1.5),
        said("user", "sure?", False),
        said("model", "It is 5.", True, versions=[7]),
    ]
    row = rollouts(7)[0] | {"segments": turns, "reason": "max_turns"}
    write_samples(path, 7, "rollouts", [row])
    write_report(path)
    chromium.open((path / "report.html").as_uri(), 1280)
    choose(chromium, "samples of", "1")  # rollouts; the page opens with validations
    there = "[...document.querySelectorAll('#sample-browser .turn')]"
    assert chromium.ask(f"{there}.map(each => each.querySelector('pre').textContent)") == [
        "let me add", HOSTILE[0], "sure?", "It is 5."
    ]  # fmt: skip
    assert chromium.ask(f"{there}.map(each => each.querySelector('p').textContent)") == [
        "model 3 tokens, trained · weights 6, 7 · reward 0.25", "tool 3 tokens, not trained · 1.5 s",
        "user 3 tokens, not trained", "model 3 tokens, trained · weights 7",
    ]  # fmt: skip
    colours = chromium.ask(f"{there}.map(each => getComputedStyle(each).borderLeftColor)")
    assert len(set(colours[:3])) == 3 and colours[0] == colours[3]
    assert chromium.ask("document.title") != "run" and not chromium.ask(SIDEWAYS)
    header = chromium.ask("document.querySelector('#sample-browser .sample header').textContent")
    assert "finish: max_turns" in header
