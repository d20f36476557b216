"""Every trained token is a drawn token, every turn is asked with all tokens before it, and each limit has its name."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from mcore_rl.agents.rendering import TurnRenderer
from mcore_rl.agents.session import EpisodeOverError, Session, SessionParts
from mcore_rl.agents.toolbox.calculator import SCHEMA, Calculator
from mcore_rl.agents.tools import ToolCall, ToolSet
from mcore_rl.config.agent import AgentConfig
from mcore_rl.rollout.episodes import Author, FinishReason
from mcore_rl.rollout.protocol import Sampling
from tests.support.awaited import awaited
from tests.support.chat_styles import STYLES, WITHOUT_TOOLS, style
from tests.support.drawn_turns import DrawnTurns, agent_row


def session(
    engine: DrawnTurns, *, room: int = 10_000, stop: tuple[str, ...] = (), ids: tuple[int, ...] = (), **settings: Any
) -> Session:
    tokenizer = engine.tokenizer
    parts = SessionParts(
        config=AgentConfig(**settings), tokenizer=tokenizer, renderer=TurnRenderer(tokenizer),
        tools=ToolSet({"calculator": Calculator({}, SCHEMA)}),
    )  # fmt: skip
    return Session(
        parts, engine, agent_row(tokenizer), "0.0/file:0", 3, 1,
        Sampling(max_tokens=room, seed=7, stop=stop, stop_token_ids=ids),
    )  # fmt: skip


@pytest.mark.parametrize("name", STYLES)
@awaited
async def test_trained_tokens_are_drawn_and_prompts_are_all_before_them(name: str) -> None:
    """The engine draws letters one by one, as no tokenizer would: any encoding of its text would be seen."""
    tokenizer, rng = style(name), random.Random(name)
    texts = ["".join(rng.choice("abc 12\n<é") for _ in range(rng.randint(1, 20))) for _ in range(6)]
    engine = DrawnTurns(tokenizer, texts)
    one = session(engine, max_turns=9)
    role = "user" if name in WITHOUT_TOOLS else "tool"
    for number in range(6):
        await one.draw()
        if number < 5:
            one.append([{"role": role, "content": rng.choice(["4", "<|im_end|></s>", "a\n"])}])
    episode = one.episode()
    drawn = [segment for segment in episode.segments if segment.author is Author.model]
    assert [segment.tokens.tolist() for segment in drawn] == [[*engine.drawn(text), engine.end] for text in texts]
    assert all(segment.trained == (segment.author is Author.model) for segment in episode.segments)
    so_far: list[int] = []
    asked = iter(engine.requests)
    for segment in episode.segments:
        if segment.author is Author.model:
            assert list(next(asked)[0].prompt.tokens) == so_far
        so_far += segment.tokens.tolist()
    assert next(asked, None) is None and episode.num_tokens == len(so_far)
    assert [segment.versions[0].version for segment in drawn] == list(range(6))


@awaited
async def test_each_turn_has_an_id_of_its_own_and_the_first_is_the_prompts() -> None:
    """Else the draws of two turns would share their seed; and one answer is the same with and without an agent."""
    engine = DrawnTurns(style("qwen2.5"), ["a", "b", "c"])
    one = session(engine)
    for _ in range(3):
        await one.draw()
        one.append([{"role": "user", "content": "more"}])
    assert [request.key for request, _ in engine.requests] == [
        ("0.0/file:0", 1), ("0.0/file:0/turn1", 1), ("0.0/file:0/turn2", 1)
    ]  # fmt: skip
    assert {request.prompt.opening for request, _ in engine.requests} == {"0.0/file:0"}
    assert {sampling.seed for _, sampling in engine.requests} == {7}


@awaited
async def test_the_room_shrinks_by_all_that_follows_the_prompt() -> None:
    engine = DrawnTurns(style("qwen2.5"), ["abc", "defg"])
    one = session(engine, room=100)
    await one.draw()
    assert one.room == 96
    one.append([{"role": "user", "content": "more"}])
    room = one.room
    await one.draw()
    assert [sampling.max_tokens for _, sampling in engine.requests] == [100, room] and one.room == room - 5


@awaited
async def test_limits_end_with_their_names() -> None:
    tokenizer = style("qwen2.5")
    more = [{"role": "user", "content": "more"}]

    async def run(one: Session, turns: list[str]) -> None:
        for _ in turns:
            await one.draw()
            one.append(more)
        await one.draw()

    async def reason(turns: list[str], **settings: Any) -> tuple[str, FinishReason, int]:
        one = session(DrawnTurns(tokenizer, turns), **settings)
        with pytest.raises(EpisodeOverError) as caught:
            await run(one, turns)
        episode = one.episode(caught.value.reason, caught.value.end)
        return caught.value.reason, episode.end, episode.num_response_tokens

    added = len(TurnRenderer(tokenizer).appended(more, tokenizer.eos_token_id))
    assert await reason(["a", "b"], max_turns=2) == ("max_turns", FinishReason.length, 2 + added + 2)
    assert await reason(["abcdef"], max_turn_tokens=4) == ("max_turn_tokens", FinishReason.length, 4)
    assert await reason(["abcdef"], room=4, max_turn_tokens=4) == ("max_response_length", FinishReason.length, 4)
    # What does not fit with a token of the next turn is not appended.
    assert await reason(["a"], room=2 + added) == ("max_response_length", FinishReason.length, 2)
    assert await reason(["a", "bcd"], room=3 + added) == ("max_response_length", FinishReason.length, 3 + added)


@awaited
async def test_a_loop_that_goes_on_after_a_limit_ends_the_turn_as_the_template_does() -> None:
    tokenizer = style("qwen2.5")
    engine = DrawnTurns(tokenizer, ["a", "bcdef", "g"])
    one = session(engine, max_turn_tokens=3)
    await one.draw()
    one.append([{"role": "user", "content": "more"}])
    with pytest.raises(EpisodeOverError):
        await one.draw()
    one.append([{"role": "user", "content": "more"}])
    text = tokenizer.decode(one.episode().segments[-1].tokens)
    assert text.startswith("<|im_end|>"), "no token of the drawn turn ends it"


@awaited
async def test_an_aborted_turn_ends_the_episode() -> None:
    engine = DrawnTurns(style("qwen2.5"), ["a"])
    engine.finish = FinishReason.abort
    with pytest.raises(EpisodeOverError) as caught:
        await session(engine).draw()
    assert (caught.value.reason, caught.value.end) == ("aborted", FinishReason.abort)


@awaited
async def test_too_many_calls_and_too_much_time_end_the_episode() -> None:
    call = ToolCall(name="calculator", arguments='{"expression": "1 + 1"}')
    one = session(DrawnTurns(style("qwen2.5"), ["a"]), max_calls_per_turn=2)
    await one.draw()
    with pytest.raises(EpisodeOverError, match="max_calls_per_turn"):
        await one.call_tools([call] * 3)
    assert one.tool_calls.num_calls == 0 and await one.call_tools([call] * 2) == ["2", "2"]
    late = session(DrawnTurns(style("qwen2.5"), ["a"]), max_tool_s=1e-9)
    await late.draw()
    with pytest.raises(EpisodeOverError, match="max_tool_s"):
        await late.call_tools([call])


@awaited
async def test_rewards_are_of_the_turn_and_scaled() -> None:
    one = session(DrawnTurns(style("qwen2.5"), ["a", "b"]), tool_reward_coef=0.5)
    await one.draw()
    one.reward(1.0)
    one.reward(None)
    one.append([{"role": "tool", "content": "x"}])
    one.reward(0.5)  # still the turn that called
    await one.draw()
    assert [segment.reward for segment in one.episode().segments] == [None, 0.75, None, None]


@awaited
async def test_a_stop_string_leaves_the_end_of_the_turn_to_the_template() -> None:
    tokenizer = style("qwen2.5")
    one = session(DrawnTurns(tokenizer, ["go STOP"]), stop=("STOP",))
    turn = await one.draw()
    assert (turn.text, turn.raw, turn.stop) == ("go ", "go STOP", "STOP")
    one.append([{"role": "user", "content": "more"}])
    (_, drawn, added) = one.episode().segments
    assert drawn.tokens[-1] != tokenizer.eos_token_id and added.tokens[0] == tokenizer.eos_token_id
    assert not added.trained


@awaited
async def test_a_stop_string_that_is_a_token_does_not_end_the_turn_for_the_template() -> None:
    tokenizer = style("qwen2.5")
    engine = DrawnTurns(tokenizer, ["<tool_call>x</tool_call>"])
    engine.drawn = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[method-assign]
    one = session(engine, stop=("</tool_call>",))
    turn = await one.draw()
    one.append([{"role": "tool", "content": "4"}])
    (_, drawn, added) = one.episode().segments
    assert turn.raw == "<tool_call>x</tool_call>" and drawn.tokens[-1] in tokenizer.added_tokens_decoder
    assert added.tokens[0] == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("name", "end", "is_end"),
    [("qwen2.5", "</tool_call>", False), ("qwen2.5", "<|im_end|>", True), ("llama3", "<|eot_id|>", True)],
)
@awaited
async def test_a_token_of_stop_token_ids_ends_the_turn_if_it_is_the_templates_end(
    name: str, end: str, is_end: bool
) -> None:
    tokenizer = style(name)
    (number,) = tokenizer(end, add_special_tokens=False)["input_ids"]
    one = session(DrawnTurns(tokenizer, ["x"], end=number), ids=(number,))
    turn = await one.draw()
    one.append([{"role": "user", "content": "more"}])
    (_, drawn, added) = one.episode().segments
    assert drawn.tokens[-1] == number and turn.raw == ("x" if is_end else f"x{end}")
    (of_template,) = TurnRenderer(tokenizer).ending_ids
    assert (added.tokens[0] == of_template) != is_end and of_template in (drawn.tokens[-1], added.tokens[0])


@awaited
async def test_what_calls_are_read_from_has_special_tokens_but_not_the_end() -> None:
    tokenizer = style("qwen2.5")
    engine = DrawnTurns(tokenizer, ["<tool_call>x"])
    engine.drawn = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[method-assign]
    assert (await session(engine).draw()).raw == "<tool_call>x"


@awaited
async def test_messages_and_counts() -> None:
    one = session(DrawnTurns(style("qwen2.5"), ["a", "b"]))
    await one.draw()
    await one.answer_calls([ToolCall(name="calculator", arguments='{"expression": "2 * 3"}'), ToolCall(name="no")])
    await one.draw()
    assert [each["role"] for each in one.messages] == ["user", "assistant", "tool", "assistant"]
    assert one.messages[2]["content"] == "6\nError: There is no tool 'no'. The tools are: calculator."
    counts = one.episode("mine").agent
    assert counts is not None
    assert (counts.reason, counts.turns, counts.calls, counts.failed_calls, counts.cached_tokens) == (
        "mine",
        2,
        2,
        1,
        16,
    )
    assert counts.tool_s > 0 and np.isfinite(counts.tool_s)
