from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from mcore_rl.tracking.run_files import read_run
from mcore_rl.tracking.sample_section import before_after, pairs
from mcore_rl.tracking.samples import write_samples


def rows(rights: dict[str, bool], response: str = "r") -> list[dict[str, Any]]:
    return [
        {"data_source": "a", "prompt_id": name, "prompt": f"{name}?", "response": f"{response} {name}",
         "correct": right, "score": float(right), "ground_truth": "g", "num_tokens": 7, "finish": "stop"}
        for name, right in rights.items()
    ]  # fmt: skip


def shown(tmp_path: Path, *validations: tuple[int, list[dict[str, Any]]]) -> ElementTree.Element:
    (tmp_path / "metrics.jsonl").write_text("")
    for step, samples in validations:
        write_samples(tmp_path, step, "validation", samples)
    return ElementTree.fromstring(f"<div>{before_after(read_run(tmp_path))}</div>")


def test_pairs_are_the_first_of_each_outcome_on_the_same_prompts() -> None:
    first = rows({"gone": True, **{f"l{k}": False for k in range(5)}, "x": True, "w": False, "r": True, "r2": True})
    last = rows({**{f"l{k}": True for k in range(5)}, "x": False, "w": False, "r": True, "r2": True, "new": True})
    chosen = pairs(first, list(reversed(last)))
    assert [(kind, a["prompt_id"], b["prompt_id"]) for kind, a, b in chosen] == [
        ("learned", "l0", "l0"), ("learned", "l1", "l1"), ("learned", "l2", "l2"),
        ("lost", "x", "x"), ("still wrong", "w", "w"), ("right both times", "r", "r"),
    ]  # fmt: skip


def test_the_highest_score_comes_first_and_then_the_order_of_the_file() -> None:
    first = rows(dict.fromkeys("abcde", False))
    last = rows(dict.fromkeys("abcde", True))
    for row, score in zip(last, (0.5, 1.0, None, 1.0, float("nan")), strict=True):
        row["score"] = score
    assert [a["prompt_id"] for _, a, _ in pairs(first, last)] == ["b", "d", "a"]


def test_of_several_samples_of_a_prompt_the_first_is_shown() -> None:
    first = rows({"a": False}, "one") + rows({"a": True}, "two")
    assert [(kind, a["response"]) for kind, a, _ in pairs(first, rows({"a": True}))] == [("learned", "one a")]


def test_prompt_gold_responses_and_marks_are_there(tmp_path: Path) -> None:
    page = shown(
        tmp_path, (0, rows({"a": False}, "before <b>")), (5, rows({"a": True})), (9, rows({"a": True}, "after"))
    )
    assert [each.text for each in page.iter("pre")] == ["a?", "before <b> a", "after a"]
    said = ["".join(each.itertext()) for each in page.iter("p")]
    assert said[1:] == [
        "Gold: g",
        "step 0: wrong, score 0.000, 7 tokens, finish: stop",
        "step 9: right, score 1.000, 7 tokens, finish: stop",
    ]


def test_messages_read_as_a_conversation(tmp_path: Path) -> None:
    samples = rows({"a": True})
    samples[0]["prompt"] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    page = shown(tmp_path, (0, samples))
    assert next(page.iter("pre")).text == "system: Be brief.\n\nuser: 2+2?"


def test_one_validation_other_prompts_missing_columns_and_none(tmp_path: Path) -> None:
    def said(page: ElementTree.Element) -> str:
        return "".join(page.itertext())

    assert "No validation samples" in said(shown(tmp_path))
    assert "only validation, step 3" in said(shown(tmp_path, (3, rows({"a": True}))))
    assert "different prompts" in said(shown(tmp_path, (4, rows({"b": True}))))


def test_missing_columns_and_half_a_file_are_left_out(tmp_path: Path) -> None:
    for step in (0, 5):
        write_samples(tmp_path, step, "validation", [{"prompt_id": "a", "response": "bare"}])
    (tmp_path / "validation/step_6.parquet").write_bytes(b"half")
    page = shown(tmp_path)
    assert [each.text for each in page.iter("pre")] == [None, "bare", "bare"]
    assert ["".join(each.itertext()) for each in page.iter("p")][1:] == ["step 0: ", "step 5: "]
