r"""Whole responses that give an answer without a box, as functions of its LaTeX; None where one does not apply.

They know nothing of the grader.  ``SENTENCES`` say the answer; ``DENIALS`` say another one, or several.
"""

from __future__ import annotations

import re
from collections.abc import Callable

Sentence = Callable[[str], str | None]

_PLAIN = re.compile(r"-?\d{1,3}(?:,\d{3})+|-?\d+(?:\.\d+)?|-?\d+/\d+")
_FRACTION = re.compile(r"(-?)\\frac\{(\d+)\}\{(\d+)\}")
_LETTER = re.compile(r"\\text\{\(?([A-J])\)?\}|\(?([A-J])\)?")
_WORD = re.compile(r"\\text\{([A-Z][A-Za-z ]+)\}|([A-Z][a-z]+)")


def _formula(form: str) -> Sentence:
    """``form`` with the answer for ``%``, where the answer may stand within the signs of a formula."""

    def write(answer: str) -> str | None:
        has_sign = re.search(r"\$|\\\(|\\\[", answer) is not None
        return None if has_sign or re.search(r"[A-Za-z]{2,} [a-z]", answer) else form.replace("%", answer)

    return write


def _plain(form: str) -> Sentence:
    """``form`` with the answer for ``%``, where the answer is a number that needs no formula."""

    def write(answer: str) -> str | None:
        said = plain_number(answer)
        return None if said is None else form.replace("%", said)

    return write


def plain_number(answer: str) -> str | None:
    """The answer as it stands in plain text; None if it is no plain number."""
    if match := _FRACTION.fullmatch(answer.strip()):
        return f"{match[1]}{match[2]}/{match[3]}"
    return answer.strip() if _PLAIN.fullmatch(answer.strip()) else None


def _letter(form: str) -> Sentence:
    def write(answer: str) -> str | None:
        match = _LETTER.fullmatch(answer.strip())
        return None if match is None else form.replace("%", match[1] or match[2])

    return write


def _word(form: str) -> Sentence:
    def write(answer: str) -> str | None:
        match = _WORD.fullmatch(answer.strip())
        return None if match is None else form.replace("%", (match[1] or match[2]).strip())

    return write


SENTENCES: dict[str, Sentence] = {
    "a sentence": _formula("Adding 3 and 4 helps. The answer is $%$."),
    "a sentence in brackets": _formula(r"There are 12 cases. So the answer is \(%\)."),
    "a display": _formula("Therefore the final answer is\n\\[\n%\n\\]\n"),
    "double dollars": _formula("The final answer is: $$%$$"),
    "a label": _formula("We take 7 of 9.\n\nAnswer: $%$"),
    "a bold label": _formula("We take 7 of 9.\n\n**Answer:** $%$"),
    "a bold line": _formula("**Final Answer: $%$**"),
    "a heading": _formula("We take 7 of 9.\n\n### Final Answer\n\n$%$\n"),
    "a bold formula": _formula("With 5 tries, the final answer is **$%$**."),
    "a hope": _formula("Final Answer: The final answer is $%$. I hope it is correct."),
    "a last formula": _formula("We try 4 cases. Hence we find $%$."),
    "a reason behind": _formula("The answer is $%$, because the 2 others are excluded."),
    "a remark behind": _formula("The answer is $%$. There are 2 other ways to see this."),
    "a corrected sentence": _formula("The answer is $-98.25$. Wait, I made an error. The answer is $%$."),
    "a bare number": _plain("There are 12 cases. The answer is %."),
    "a bold number": _plain("The final answer is **%**."),
    "an italic number": _plain("The final answer is *%*."),
    "an underlined number": _plain("The final answer is __%__."),
    "a number in underscores": _plain("The final answer is _%_."),
    "a number as code": _plain("The final answer is `%`."),
    "a bold number behind a bold label": _plain("**Answer:** **%**"),
    "a bare number behind a bold label": _plain("We take 7 of 9.\n**Answer**: %"),
    "a number on a line of its own": _plain("We take 7 of 9.\n\n**Final Answer**\n\n%"),
    "a bold sentence": _plain("**The answer is %.**"),
    "the last number": _plain("There are 12 cases. In all she has **%**."),
    "a number that ends the text": _plain("There are 12 cases, and in all\n\n**%**"),
    "a coloured number": _plain(r"The answer is \textcolor{red}{%}."),
    "an underlined formula": _plain(r"The answer is $\underline{%}$."),
    "a named number": _plain("The answer is x = %."),
    "a last equation": _plain("There are 12 cases, so $n = %$."),
    "things behind the number": _plain("The answer is **%** apples."),
    "a reason behind the number": _plain("The answer is %, since the 2 others are excluded."),
    "a letter in brackets": _letter("We take 7 of 9. The answer is (%)."),
    "a bare letter": _letter("We take 7 of 9. The answer is %."),
    "a bold letter": _letter("The correct answer is **(%)**."),
    "a letter behind a label": _letter("**Answer: %**"),
    "an option": _letter("The correct option is (%)."),
    "a choice": _letter("So the correct choice is **%**."),
    "a letter as a formula": _letter(r"The answer is $\textbf{(%)}$."),
    "a bare word without a box": _word("We take 7 of 9. The answer is %."),
    "a bold word": _word("The answer is **%**."),
    "a word as a formula": _word(r"The answer is $\text{%}$."),
}

DENIALS: dict[str, Sentence] = {
    "denied": _formula("The answer is not $%$."),
    "one of two": _formula("The answer is $%$ or $9973$."),
    "one of two numbers": _plain("The answer is **%** or **9973**."),
    "taken back": _formula("The answer is $%$. Wait, I made an error. The answer is $-98.25$."),
    "a number taken back": _plain("The answer is %. No, the answer is **-98.25**."),
    "millions": lambda answer: None if answer.strip("-0.") == "" else _plain("The answer is **%** million.")(answer),
    "another answer in bold": _plain("The first try gave %. The answer is **-98.25**."),
    "a letter denied": _letter("The answer is not (%)."),
    "another letter": _letter("(%) is tempting. The answer is **(J)**."),
}


def in_sentence(answer: str, index: int) -> str | None:
    """``answer`` in one of the sentences that it fits, chosen by ``index``; None if it fits none."""
    fitting = [said for write in SENTENCES.values() if (said := write(answer)) is not None]
    return fitting[index % len(fitting)] if fitting else None
