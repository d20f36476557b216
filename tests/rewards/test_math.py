"""Mathematics by value: equal expressions, unequal ones, and no signals."""

from __future__ import annotations

import signal
import threading

import pytest

from mcore_rl.config.reward import MathConfig, RewardConfig
from mcore_rl.rewards import symbolic_process
from mcore_rl.rewards.math import grade_math
from mcore_rl.rewards.score import RewardRequest, Score
from mcore_rl.rewards.symbolic_process import Algebra


def grade(response: str, ground_truth: object) -> Score:
    return grade_math(RewardRequest(("p", 0), "lighteval/MATH", response, ground_truth), RewardConfig())


@pytest.mark.parametrize(
    ("response", "ground_truth", "right"),
    [
        (r"so \boxed{\frac{1}{2}}", r"\frac12", True),
        (r"so \boxed{0.5}", r"\frac{1}{2}", True),
        (r"\boxed{50\%}", r"50\%", True),
        (r"\boxed{x^2-1}", "(x-1)(x+1)", True),
        (r"\boxed{\{2, 1\}}", r"\{1, 2\}", True),
        (r"\boxed{(3, \frac{\pi}{2})}", r"\left( 3, \frac{\pi}{2} \right)", True),
        (r"\boxed{204}", "204", True),
        (r"\boxed{204}", 204, True),
        (r"\boxed{204}", r"Adding up, \boxed{204}.", True),  # a whole solution
        ("The answer is 204.", "204", True),
        (r"not 7 but \boxed{204}, then 7", "204", True),
        (r"\boxed{\frac{1}{3}}", r"\frac12", False),
        (r"\boxed{x^2+1}", "(x-1)(x+1)", False),
        (r"\boxed{205}", "204", False),
        (r"\boxed{", "204", False),
        (r"\boxed{(1,2)}", "1<x<2", True),
        (r"\boxed{1<x<2}", "(1,2)", False),  # an interval is asked for
        ("no idea", "204", False),
        ("", "204", False),
    ],
)
def test_answers_are_compared_by_value(response: str, ground_truth: object, right: bool) -> None:
    score = grade(response, ground_truth)
    expected = Score(float(right), {"boxed": float(r"\boxed{" in response)}, correct=float(right), answer=score.answer)
    assert score == expected


@pytest.mark.parametrize(
    ("response", "answer"),
    [(r"so \boxed{ x^2 - 1 }", "x^2-1"), ("it is 204.", "204"), (r"\boxed{1} or \boxed{7}", "1,7"), ("no idea", None)],
)
def test_the_answer_is_what_is_compared_as_it_is_written(response: str, answer: str | None) -> None:
    assert grade(response, "204").answer == answer


@pytest.mark.parametrize(
    ("answer", "ground_truth"),
    [
        ("42.", "42"), ("42;", "42"), (r"90^\circ", "90"), ("90°", "90"), ("90", r"90^\circ"), (r"1\,000", "1000"),
        ("75", r"75\%"), (r"75\%", "75"), ("0.75", r"75\%"), (r"1.24 \times 10^{-8}", "1.24e-8"), ("1.24e-8",
        r"1.24 \times 10^{-8}"),
        (r"6-5\mathrm{i}", "6-5i"), (r"\textbf{(C)}\ 5", "5"), (r"\textbf{(C)}\ 5", "C"), (r"\textbf{(C)}\ 5",
        r"\text{(C)}"),
        ("C", "C. x > 2"), ("3 1/2", r"\frac72"), ("3 1/2", "3.5"), (r"\{x|-2\leq x<1\}", r"\{x|-2\leq x<1\}"),
        ("[-2,1)", r"\{x|-2\leq x<1\}"), (r"-2 \le x < 1", r"\{x|-2\leq x<1\}"), (r"\{x \mid -2 \le x < 1\}",
        "[-2, 1)"),
        ("12", r"12 \text{ cm}"), (r"12 \text{ cm}", "12"), (r"0.12 \text{ m}", r"12 \text{ cm}"), ("12 m",
        r"12 \text{ m}"),
        ("2516_8", "2516_{8}"), ("2516", "2516_8"), (r"x \in \{1, 2\}", "1, 2"), ("x = 2, 1",
        r"x = 1 \text{ or } x = 2"),
        (r"2 \pm \sqrt{3}", r"2-\sqrt3, 2+\sqrt3"), ("0.333333", r"\frac13"), (r"0.\overline{3}", r"\frac13"),
        ("x > 3", r"(3, \infty)"),
        ("y = 2x + 1", "2x - y + 1 = 0"), ("2x+1", "y = 2x + 1"), (r"\text{18 dollars}", "18"), ("18 million",
        "18000000"),
        (r"(-\infty, \infty)", r"\mathbb{R}"), (r"\text{tuesday}", "Tuesday"), ("(4)", "4"),
        (r"\begin{bmatrix}1\\2\end{bmatrix}",
        r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"), ("0.30000000000000004", "0.3"), (".5", "0.5"),
        ("(1, 200)", "(1,200)"), ("x = 65,960", "65960"),
        (r"65,960 \text{ apples}", "65960"), (r"\textcolor{red}{\frac{\sqrt{3}}{2}}", r"\frac{\sqrt3}{2}"),
        (r"{\color{red} (1, 2)}", "(1, 2)"), (r"\underline{\mathbf{650}}", "650"), ("`650`", "650"), ("__650__", "650"),
        ("10:30 a.m.",
        r"10:30 \text{ a.m.}"),
        (r"\sum_{k=1}^{100} 2^k", "2^{101}-2"), ("5050", r"\sum_{k=1}^{100} k"), (r"\prod_{k=1}^{10} k", "10!"),
        ("x_{1} = 5", "5"), ("x_1 = 5", "5"),
    ],
)  # fmt: skip
def test_the_same_in_other_words(answer: str, ground_truth: str) -> None:
    assert grade(f"so $\\boxed{{{answer}}}$", ground_truth).value == 1.0


@pytest.mark.parametrize(
    ("answer", "ground_truth"),
    [
        ("0.0011_3", "0.0011_2"), (r"45 \text{ units}^3", r"45 \text{ units}^2"),
        ("1", r"$\{x|-2\leq x < 1\}$"), ("5", r"a \oplus 5"), ("0.0000000123", "0.0000000124"), ("eat", "tea"),
        ("1", r"\{x|-2\leq x<1\}"), ("(1,-2)", "[1,-2]"), ("[1,-2]", "(1,-2)"), ("2516_{10}", "2516_8"), ("2516_9",
        "2516_8"),
        (r"12 \text{ cm}", r"12 \text{ m}"), ("12 cm", "12 m"), (r"12 \text{ cm}^2", r"12 \text{ cm}"), ("1.23e-8",
        "1.24e-8"),
        ("6t", "6"), (r"\text{eat}", r"\text{tea}"), ("4=5", "5"), ("5=4", "5"), ("x^2+2=0", "x^2+1=0"), (r"(D)\ 5",
        "(C)"),
        (r"\textbf{(C)}\ 6", "5"), ("1, 2", "2"), ("2", "1, 2"), ("18 million", "18"), ("5 or 6", "5"), ("1:58 pm",
        "1:58 am"),
        (r"\infty - \infty", "0"), (r"\frac{0}{0}", "0"), ("", "0"), (" ", "0"), ("nan", "0"), ("5", ".5"),
        ("0.33333", r"\frac13"),
        ("10^{10^{10}} - 10^{10^{10}} + x", "x + 1"), (r"\text{not } 5", "5"), (r"5 \text{ or more}", "5"), ("7", "C"),
        (r"(B) \text{ or } (C)", "B"), ("(B) or (C)", "B"), ("1200", "(1,200)"), ("(1,200)", "1200"),
        ("10000000000000.5", "10000000000000.6"), (r"\cancel{5}", "5"), ("x = 65, 960", "65960"),
        (r"\sum_{k=1}^{100} 2^k", "2^{101}-1"), (r"\sum_{k=1}^{100} k", "100"),
        (r"\sum_{k=2}^{100} k", r"\sum_{k=1}^{100} k"),
        ("The slope is 6, so it rises", "The slope is 5, so it rises"), ("x" * 5000, "x"), (r"\{1, 1, 2\}",
        r"\{1, 2\}"),
    ],
)  # fmt: skip
def test_something_else(answer: str, ground_truth: str) -> None:
    assert grade(f"so $\\boxed{{{answer}}}$", ground_truth).value == 0.0


@pytest.mark.parametrize(
    ("response", "read"),
    [
        (r"\boxed {42}", "42"), (r"\boxed{7}. Wait, that is wrong: \boxed{8}", "8"), (r"\boxed{8} \boxed{7}", "7"),
        (r"\boxed{7}, no, \boxed{8}", "8"), (r"$\boxed{3}$, $\boxed{5}$ and $\boxed{7}$", "3,5,7"),
        (r"\boxed{8} and \boxed{8}", "8"),
        (r"\boxed{\boxed{8}}", "8"), (r"\fbox{8}", "8"), (r"\boxed 8", "8"), (r"\boxed{8} and then \boxed{7", "8"),
        (r"\boxed{\frac{1}{2}}", "1/2"), (r"\boxed{\{1\}}", "1"), ("\\boxed{\n8\n}", "8"),
    ],
)  # fmt: skip
def test_the_last_box_counts(response: str, read: str) -> None:
    assert grade(response, read).value == 1.0
    assert grade(response, f"{read}1").value == 0.0


def test_a_bare_percentage_is_right_by_option() -> None:
    strict = RewardConfig(math=MathConfig(percent=False))
    for answer, right in (("75", 0.0), (r"75\%", 1.0), ("0.75", 1.0)):
        request = RewardRequest(("p", 0), "math", f"\\boxed{{{answer}}}", r"75\%")
        assert grade_math(request, strict).value == right


def test_plain_numbers_need_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: object) -> None:
        raise AssertionError("asked for algebra")

    monkeypatch.setattr(Algebra, "_ask", ask)
    for answer in (
        "204",
        "204.0",
        r"\$204",
        "1,204",
        "-3",
        r"\frac{1}{2}",
        r"75\%",
        "(1, 2)",
        r"\text{odd}",
        r"12 \text{ cm}",
    ):
        assert grade(f"\\boxed{{{answer}}}", answer).value == 1.0
        assert grade("\\boxed{9973}", answer).value == 0.0


@pytest.mark.parametrize("huge", [pytest.param("10^{10^{10}}", marks=pytest.mark.tier("full")), "9^{9^{9}}"])
def test_a_huge_power_costs_its_answer_and_no_more(monkeypatch: pytest.MonkeyPatch, huge: str) -> None:
    monkeypatch.setattr(symbolic_process, "LIMIT_S", 1.0)
    assert grade(f"\\boxed{{{huge}}}", "5") == Score(0.0, {"boxed": 1.0}, correct=0.0, answer=huge)
    assert grade(f"\\boxed{{{huge}}}", huge).value == 1.0


def test_a_ground_truth_without_a_formula_is_named() -> None:
    with pytest.raises(ValueError, match=r"is no formula\. Correct reward_model.ground_truth"):
        grade(r"\boxed{1}", "")


def test_no_signal_is_used() -> None:
    """It works in a thread, where the library's own limits raise, and leaves the handler alone."""
    before = signal.getsignal(signal.SIGALRM)
    scores: list[Score] = []
    thread = threading.Thread(target=lambda: scores.append(grade(r"\boxed{2}", "2")))
    thread.start()
    thread.join()
    assert [score.value for score in scores] == [1.0]
    assert signal.getsignal(signal.SIGALRM) is before
