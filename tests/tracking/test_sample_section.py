from __future__ import annotations

import json
from base64 import b64encode
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.tracking.run_files import read_run
from mcore_rl.tracking.sample_section import (
    MAX_BYTES,
    MAX_STEPS,
    MAX_TEXT,
    as_data,
    chosen_steps,
    sample_browser,
    shortened,
)
from mcore_rl.tracking.samples import thumbnail_file, write_samples
from tests.support.pictures import encoded, noise

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "<img src=x onerror=alert(1)>",
    "]]>",
    "\u2028 & &amp;",
)


class Scripts(HTMLParser):
    """What an HTML parser takes for the content of the page's scripts, and all tags that it sees."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.content = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script":
            self.content += data


def embedded(run_dir: Path) -> dict[str, Any]:
    """The samples of the section, as its script reads them."""
    html = sample_browser(read_run(run_dir))
    content = html.partition('id="sample-data">')[2].partition("</script>")[0]
    return dict(json.loads(content))


def rollouts(step: int, count: int, response: str = "r") -> list[dict[str, Any]]:
    return [
        {
            "data_source": "a", "prompt_id": str(k // 4), "prompt": f"question {k // 4}", "response": f"{response} {k}",
            "score": (k * 37 % count) / count, "correct": k % 3 == 0, "ground_truth": "7", "num_tokens": k,
            "finish": "stop",
        }
        for k in range(count)
    ]  # fmt: skip


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "metrics.jsonl").write_text("")
    return tmp_path


def test_a_text_can_neither_end_its_element_nor_be_markup() -> None:
    html = f'<script type="application/json">{as_data(list(HOSTILE))}</script>'
    assert not set("<>&") & set(as_data(list(HOSTILE))), "browsers end a script at more than Python's parser does"
    seen = Scripts(html)
    assert seen.tags == ["script"] and json.loads(seen.content) == list(HOSTILE)


def test_the_extremes_and_the_first_of_a_step_are_there_and_the_page_says_of_how_many(run_dir: Path) -> None:
    rows = rollouts(1, 100)
    write_samples(run_dir, 1, "rollouts", rows)
    data = embedded(run_dir)
    (source,) = data["sources"]
    assert source["note"] == (
        "1 of 1 steps are on this page, of each up to 30 of 100 samples: the highest scores, the lowest, and the first "
        "drawn."
    )
    places = [row[8] for row in source["rows"]]
    scores = sorted(range(100), key=lambda k: rows[k]["score"])
    assert places == sorted(places) and len(set(places)) == 30
    assert set(scores[:10] + scores[-10:]) <= set(places)
    rest = [k for k in range(100) if k not in scores[:10] + scores[-10:]]
    assert set(rest[:10]) <= set(places)
    for row in source["rows"]:
        ours = rows[row[8]]
        assert row[:5] == [1, row[1], ours["score"], int(ours["correct"]), ours["num_tokens"]]
        assert row[6] == ours["response"] and data["prompts"][row[1]] == [
            "a",
            ours["prompt_id"],
            ours["prompt"],
            "7",
            [],
        ]


def test_validations_show_the_same_prompts_at_every_step(run_dir: Path) -> None:
    for step in (0, 5, 10):
        write_samples(run_dir, step, "validation", rollouts(step, 400)[::-1] if step == 5 else rollouts(step, 400))
    (source,) = embedded(run_dir)["sources"]
    of_step = {step: {row[1] for row in source["rows"] if row[0] == step} for step in (0, 5, 10)}
    assert of_step[0] == of_step[5] == of_step[10] and len(of_step[0]) == 30


def test_long_texts_lose_their_middle_and_many_of_them_fit(run_dir: Path) -> None:
    for step in range(40):
        write_samples(run_dir, step, "rollouts", rollouts(step, 64, "x" * 20_000))
    html = sample_browser(read_run(run_dir))
    assert len(html.encode()) < MAX_BYTES + 1000
    (source,) = embedded(run_dir)["sources"]
    assert all(row[6].endswith(f" {row[8]}") and "characters are left out here" in row[6] for row in source["rows"])
    assert shortened("a" * MAX_TEXT) == "a" * MAX_TEXT and shortened("\ud800\x00") == "\ufffd\ufffd"


def test_scores_that_are_none_and_columns_that_are_missing(run_dir: Path) -> None:
    write_samples(run_dir, 3, "rollouts", [{"prompt": "p", "response": "r", "score": float("nan")}])
    (source,) = embedded(run_dir)["sources"]
    assert source["rows"] == [[3, 0, None, None, None, None, "r", None, 0, None, False]]
    assert sample_browser(read_run(record_nothing(run_dir / "empty"))) == ""


def record_nothing(path: Path) -> Path:
    path.mkdir()
    (path / "metrics.jsonl").write_text("")
    return path


def test_steps_that_are_chosen_stay_as_the_run_goes_on() -> None:
    before: set[int] = set()
    for last in range(1, 2000):
        steps = list(range(1, last + 1))
        now = chosen_steps(steps)
        assert now == sorted(set(now)) and len(now) <= MAX_STEPS and now[0] == 1 and now[-1] == last
        gone = before - set(now) - {last - 1}
        assert not gone or len(now) <= MAX_STEPS // 2 + 2, "only when every second one leaves"
        before = set(now)
    assert chosen_steps([]) == [] and chosen_steps([4]) == [4] and chosen_steps([4, 9]) == [4, 9]


NOTHING = {"trained": False, "reward": None, "versions": [], "tool_s": 0.0}
TURNS = [
    NOTHING | {"author": "prompt", "text": "", "num_tokens": 4},
    NOTHING | {"author": "model", "text": "add", "num_tokens": 2, "trained": True, "reward": 0.5, "versions": [3, 4]},
    NOTHING | {"author": "tool", "text": HOSTILE[0], "num_tokens": 1, "tool_s": 0.257},
]


def test_pictures_of_prompts_are_named_and_shown_once(run_dir: Path) -> None:
    keys = [f"{number:064x}" for number in range(3)]
    (run_dir / "media").mkdir()
    for key in keys[:2]:
        thumbnail_file(run_dir, key).write_bytes(encoded(noise(8, 8, int(key, 16)), "WEBP"))
    images = [{"sha256": key, "source": f"/data/of somebody/{place}.png"} for place, key in enumerate(keys)]
    rows = [row | {"images": images[:2] if row["prompt_id"] == "0" else images[1:]} for row in rollouts(1, 8)]
    write_samples(run_dir, 1, "rollouts", rows)
    write_samples(run_dir, 1, "validation", [each | {"images": None} for each in rows[:4]])
    data = embedded(run_dir)
    assert {prompt[1]: prompt[4] for prompt in data["prompts"] if prompt[4]} == {"0": [0, 1], "1": [1, 2]}
    assert [name for name, _ in data["pictures"]] == ["0.png", "1.png", "2.png"], "and no folder of the machine"
    addresses = [address for _, address in data["pictures"]]
    for address, key in zip(addresses, keys, strict=True):
        file = thumbnail_file(run_dir, key)
        expected = b64encode(file.read_bytes()).decode() if file.exists() else ""
        assert address == (f"data:image/webp;base64,{expected}" if expected else "")


def test_a_conversation_is_there_turn_by_turn(run_dir: Path) -> None:
    row = rollouts(1, 1)[0] | {"finish": "length", "reason": "max_turns"}
    long = [TURNS[0], TURNS[1] | {"text": "x" * 9000}]
    rows = [row | {"segments": TURNS}, row | {"segments": long}, row | {"reason": None}]
    write_samples(run_dir, 1, "rollouts", [*rows, row | {"segments": [{"author": "model"}]}])
    (source,) = embedded(run_dir)["sources"]
    first, second, plain, broken = sorted(source["rows"], key=lambda each: each[8])
    assert first[9] == [["model", "add", 2, 1, 0.5, [3, 4], 0], ["tool", HOSTILE[0], 1, 0, None, [], 0.26]]
    assert (first[5], first[6], first[10]) == ("max_turns", "", True)
    assert "characters are left out here" in second[9][0][1] and len(second[9][0][1]) < MAX_TEXT + 100
    assert (plain[5], plain[6], plain[9]) == ("length", "r 0", None)
    assert broken[9] == [], "it has a prompt alone"
