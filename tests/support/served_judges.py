"""A tiny judge that ends its answers, and what it answers by transformers."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mcore_rl.doctor.tiny_task import write_mixture
from tests.support import prompt_files
from tests.support.run_task import SIZES

RUBRIC = "Is {response} right?"
PATTERN = r"(\d)"  # the last digit
MAX_TOKENS = 24
ENDS = 1.5  # of the row of the end in the output projection, over the mean row: some answers end, some never


def write_judge(directory: Path) -> Path:
    """The task's tiny mixture, which says nothing but digits and the end of its turn."""
    tokenizer = prompt_files.tokenizer()
    write_mixture(directory, tokenizer, SIZES)
    tokenizer.save_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    digits = [tokenizer.encode(str(digit), add_special_tokens=False)[-1] for digit in range(10)]
    with torch.no_grad():
        rows = model.lm_head.weight
        kept = rows[digits].clone()
        end = torch.randn(rows.shape[1], generator=torch.Generator().manual_seed(1))
        rows.zero_()
        rows[digits] = kept
        rows[tokenizer.eos_token_id] = ENDS * kept.norm(dim=1).mean() * end / end.norm()
    model.save_pretrained(directory)
    return directory


class Transformers:
    """The judge of ``directory`` by transformers' greedy generation."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(directory)
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def answer(self, text: str) -> tuple[str, bool]:
        """(what it says to ``text``, whether that was cut off)."""
        said = [{"role": "user", "content": text}]
        asked = self._tokenizer.apply_chat_template(
            said, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        length = asked["input_ids"].shape[1]
        with torch.no_grad():
            tokens = self._model.generate(**asked, max_new_tokens=MAX_TOKENS, do_sample=False)[0, length:]
        is_whole = tokens[-1] == self._tokenizer.eos_token_id
        return self._tokenizer.decode(tokens, skip_special_tokens=True), not is_whole

    def score(self, text: str) -> float | None:
        """The last digit of a whole answer, of 9; None: there is no score."""
        said, truncated = self.answer(text)
        digits = [letter for letter in said if letter.isdigit()]
        return int(digits[-1]) / 9 if digits and not truncated else None
