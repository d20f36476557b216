"""Conversations for the reward model, and what becomes of a response that it gives no score; no engine runs here."""

from __future__ import annotations

import asyncio
import math
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from mcore_rl.config.data import Truncation
from mcore_rl.config.engine import Device
from mcore_rl.config.reward import OverlongConfig, RewardConfig
from mcore_rl.config.reward_model import RewardTransform
from mcore_rl.config.trainer import ModelPathConfig
from mcore_rl.controller.step.reward_model import Encoder, Messages, RewardModel, prepare_encoder, template_problem
from mcore_rl.ground.errors import ConfigError, DeadEngineError
from mcore_rl.parallel.device import detect
from mcore_rl.rewards.score import RewardRequest, Score
from tests.support import prompt_files, reward_models
from tests.support.checkpoints import edit_config

CPU = detect(Device.cpu)
ASKED: Messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2 + 3?"}]
NO_ANSWERS = "{% for message in messages if message['role'] != 'assistant' %}{{ message['content'] }}{% endfor %}"


def said(response: str) -> Messages:
    return [*ASKED, {"role": "assistant", "content": response}]


def encoder(template: str = prompt_files.CHATML, **changes: Any) -> Encoder:
    settings = dict(pad_token_id=None, max_length=500, truncation=Truncation.error) | changes
    return Encoder(prompt_files.tokenizer(template), **settings)  # type: ignore[arg-type]


class Engines:
    """Gives ``answer`` to any text."""

    def __init__(self, answer: float | str | Exception) -> None:
        self.answer = answer
        self.texts: list[list[int]] = []

    async def classify(self, tokens: list[int]) -> float | str:
        self.texts.append(tokens)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def score(
    answer: float | str | Exception,
    reward: RewardConfig | None = None,
    transform: RewardTransform = RewardTransform.none,
    **changes: Any,
) -> Score:
    engines, config = Engines(answer), reward or RewardConfig(error_score=-7.0)
    model = RewardModel(encoder(**changes), engines, config, transform)  # type: ignore[arg-type]
    key, messages = ("train/1", 0), said("it is 5")
    request = RewardRequest(key, "anything", "it is 5", None, num_tokens=9, max_tokens=10, messages=messages)
    with closing(model):
        return asyncio.run(model.score(request))


def test_the_answer_stands_where_the_template_puts_it() -> None:
    text = encoder().text(said("it is 5"))
    assert (
        text == "<|begin|>system\nbe brief<|end|>\n<|begin|>user\n2 + 3?<|end|>\n<|begin|>assistant\nit is 5<|end|>\n"
    )
    tokenizer = prompt_files.beginning_tokenizer()  # adds its own beginning to any text that is not a template's
    tokenizer.chat_template = prompt_files.CHATML
    twice = Encoder(tokenizer, None, 500, Truncation.error).tokens(said("it is 5"))
    assert twice == encoder().tokens(said("it is 5")) and tokenizer.decode(twice) == text


def test_padding_at_the_end_is_no_part_as_in_transformers(tmp_path: Path) -> None:
    """A template that ends in the token that config.json pads with: transformers asks at the last one before it."""
    ends = prompt_files.tokenizer().eos_token_id
    padding = encoder("{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}", pad_token_id=ends)
    stripped, plain = padding.tokens(said("5")), encoder(padding.tokenizer.chat_template).tokens(said("5"))
    assert plain == [*stripped, ends] and ends in stripped, "those inside stay"
    reward_models.write_judge(tmp_path)
    edit_config(tmp_path, pad_token_id=ends)
    model = reward_models.load(tmp_path)
    small = [[token % 250 + 6 if token != ends else ends for token in each] for each in (stripped, plain)]
    with torch.no_grad():
        whole = float(model(torch.tensor([small[1]])).logits[0, 0])
    edit_config(tmp_path, pad_token_id=None)
    assert reward_models.reference(reward_models.load(tmp_path), [small[0]]) == pytest.approx([whole], abs=1e-5)


def test_only_padding_is_not_nothing() -> None:
    ends = prompt_files.tokenizer().eos_token_id
    assert encoder("<|end|><|end|>", pad_token_id=ends).tokens(said("5")) == [ends]


@pytest.mark.parametrize(
    ("truncation", "kept"),
    [(Truncation.left, slice(-7, None)), (Truncation.right, slice(0, 7))],
)
def test_long_conversations_are_cut_as_configured(truncation: Truncation, kept: slice) -> None:
    whole = encoder().tokens(said("it is 5"))
    assert encoder(max_length=7, truncation=truncation).tokens(said("it is 5")) == whole[kept]
    assert encoder(max_length=len(whole), truncation=Truncation.error).tokens(said("it is 5")) == whole


def test_long_conversations_are_refused_by_name() -> None:
    length = len(encoder().tokens(said("it is 5")))
    verdict = score(1.0, max_length=length - 1)
    assert verdict.value == -7.0 and verdict.error is not None
    assert verdict.error.startswith("raised: ValueError: the conversation has ")
    assert f"{length} tokens, more than reward_model.max_length={length - 1}. Raise it, or write" in verdict.error


def test_a_score_is_the_reward_and_a_part_for_metrics() -> None:
    verdict = score(2.25)
    assert verdict == Score(2.25, {"model": 2.25})


@pytest.mark.parametrize(
    ("value", "reward"), [(0.0, 0.5), (math.log(3), 0.75), (-math.log(3), 0.25), (1e4, 1.0), (-1e4, 0.0)]
)
def test_a_sigmoid_is_the_reward_where_it_is_asked_for(value: float, reward: float) -> None:
    verdict = score(value, transform=RewardTransform.sigmoid)
    assert verdict.value == pytest.approx(reward, abs=1e-12) and verdict.parts == {"model": value}
    assert score(math.nan, transform=RewardTransform.sigmoid).error is not None


def test_overlong_is_added_as_to_a_grader_s() -> None:
    verdict = score(2.25, RewardConfig(overlong=OverlongConfig(enable=True, length=4, penalty_factor=1.0)))
    assert verdict.value == 2.25 - 0.75 and verdict.parts == {"model": 2.25, "overlong": -0.75}


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (math.nan, "not_a_number: the score is nan, not a finite number"),
        (-math.inf, "not_a_number: the score is -inf, not a finite number"),
        ("out of luck", "raised: ValueError: vLLM gave no score: out of luck"),
    ],
)
def test_no_score_is_a_named_error(answer: float | str, error: str) -> None:
    assert score(answer) == Score(-7.0, error=error)


def test_a_dead_engine_is_no_sample_s_error() -> None:
    with pytest.raises(DeadEngineError, match="reward engine 0 died"):
        score(DeadEngineError("reward engine 0 died"))


def test_a_template_that_refuses_is_a_named_error() -> None:
    verdict = score(1.0, template=prompt_files.STRICT)
    assert verdict.error is not None and "roles must alternate" in verdict.error and verdict.value == -7.0
    assert "roles must alternate" in template_problem(encoder(prompt_files.STRICT), ASKED)
    assert template_problem(encoder(NO_ANSWERS), ASKED) == "the chat template leaves the response out"
    assert template_problem(encoder(), ASKED) == ""


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("judge")
    reward_models.write_judge(directory)
    return directory


@pytest.fixture
def edited(judge: Path, tmp_path: Path) -> Path:
    shutil.copytree(judge, tmp_path, dirs_exist_ok=True)
    return tmp_path


def refusal(directory: Path, **changes: object) -> str:
    with pytest.raises(ConfigError) as error:
        prepare_encoder(reward_models.config(directory, **changes), CPU)
    return str(error.value)


def test_the_model_s_own_tokenizer_or_another(judge: Path, tmp_path: Path) -> None:
    own = prepare_encoder(reward_models.config(judge, max_length=99, truncation=Truncation.left), CPU)
    assert own.text(said("5")) == "system: be brief\nuser: 2 + 3?\nassistant: 5\n"
    assert (own.max_length, own.truncation) == (99, Truncation.left)
    assert own.pad_token_id == AutoTokenizer.from_pretrained(judge).pad_token_id is not None
    other = AutoTokenizer.from_pretrained(judge)
    other.chat_template = prompt_files.CHATML
    other.save_pretrained(tmp_path)
    named = ModelPathConfig(path=str(judge), tokenizer_path=str(tmp_path))
    assert prepare_encoder(reward_models.config(judge, model=named), CPU).text(said("5")).startswith("<|begin|>system")


def test_a_tokenizer_that_cannot_be_read_with(edited: Path) -> None:
    (edited / "chat_template.jinja").unlink()
    said = refusal(edited)
    assert f"reward_model.model.tokenizer_path={edited}: chat_template.jinja: there is none" in said
    (edited / "chat_template.jinja").write_text(NO_ANSWERS)
    assert "the chat template leaves the response out. Use a chat template of" in refusal(edited)
    assert "is no directory" in refusal(edited, model=ModelPathConfig(path=str(edited), tokenizer_path="nowhere"))


def test_a_tokenizer_needs_no_pad_and_no_eos_to_read_with(edited: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(edited)
    tokenizer.pad_token = tokenizer.eos_token = None
    tokenizer.save_pretrained(edited)
    assert prepare_encoder(reward_models.config(edited), CPU).tokenizer.pad_token is None


def test_a_tokenizer_of_another_model_is_refused(judge: Path, tmp_path: Path) -> None:
    prompt_files.tokenizer().save_pretrained(tmp_path)
    said = refusal(judge, model=ModelPathConfig(path=str(judge), tokenizer_path=str(tmp_path)))
    assert f"reward_model.model.tokenizer_path={tmp_path}: has token " in said
    assert "and the reward model's vocabulary has 267. Name the tokenizer of the reward model" in said


def test_model_and_tokenizer_are_refused_together(edited: Path) -> None:
    edit_config(edited, architectures=["LlamaForCausalLM"])
    (edited / "chat_template.jinja").unlink()
    said = refusal(edited, max_num_seqs=0)
    for words in ("3 problems", "LlamaForCausalLM", "chat_template.jinja", "max_num_seqs=0"):
        assert words in said, said
