"""One live engine (llama, float32, CPU): what it draws, what it says of it, and what may happen in between.

The largest differences measured: log-probs 1.1e-6 from transformers', 0 between batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from mcore_rl.ground.errors import RolloutError
from mcore_rl.rollout.protocol import (
    EngineMemory,
    FinishReason,
    Pause,
    Prompt,
    Request,
    Sample,
    Sampling,
    VersionSpan,
    requests_of,
)
from mcore_rl.rollout.vllm.engine.process import EngineProcess
from tests.support import rollouts
from tests.support.forked import start_engine
from tests.support.rollouts import (
    EOS,
    assert_same,
    chosen,
    collect,
    generate,
    prompts,
    reference_logprobs,
    until_running,
)

ATOL = 1e-5  # ten times what was measured
FREE = Sampling(max_tokens=24, ignore_eos=True, seed=3)
PASSED = {"disable_cascade_attn": True, "prefix_caching_hash_algo": "sha256_cbor"}  # which change no number
LONG = 300  # tokens: what must happen in the middle of a sample has time to


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    directory = tmp_path_factory.mktemp("llama")
    return directory, rollouts.write("llama", directory, tokenizer=True)


@pytest.fixture(scope="module")
def model(checkpoint: tuple[Path, PreTrainedModel]) -> PreTrainedModel:
    return checkpoint[1]


@pytest.fixture(scope="module")
def engine(checkpoint: tuple[Path, PreTrainedModel], processes: None) -> Iterator[EngineProcess]:
    with start_engine(
        "rollout-0", checkpoint[0], rollouts.config(max_response_length=LONG, engine=PASSED), version=4
    ) as engine:
        yield engine


@pytest.mark.tier("test")
def test_greedy_tokens_are_those_of_transformers(engine: EngineProcess, model: PreTrainedModel) -> None:
    given = prompts(6)
    samples = generate(engine, requests_of(given, 1), Sampling(max_tokens=24, temperature=0))
    for prompt in given:
        sample = samples[prompt.id, 0]

        ids = model.generate(torch.tensor([prompt.tokens]), max_new_tokens=24, do_sample=False)[0, len(prompt.tokens) :]
        np.testing.assert_array_equal(sample.tokens, ids.numpy())
        expected = chosen(reference_logprobs(model, prompt.tokens, sample.tokens), sample.tokens)
        np.testing.assert_allclose(sample.logprobs, expected, rtol=0, atol=ATOL)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_are_of_the_distribution_that_was_drawn_from(
    engine: EngineProcess, model: PreTrainedModel, temperature: float
) -> None:
    given = prompts(5)
    samples = generate(engine, requests_of(given, 2), Sampling(max_tokens=24, temperature=temperature, ignore_eos=True))
    for prompt in given:
        for index in range(2):
            sample = samples[prompt.id, index]
            assert sample.logprobs.dtype == np.float32 and len(sample.logprobs) == len(sample.tokens) == 24
            expected = chosen(reference_logprobs(model, prompt.tokens, sample.tokens, temperature), sample.tokens)
            np.testing.assert_allclose(sample.logprobs, expected, rtol=0, atol=ATOL)


def test_logprobs_under_top_p_and_top_k_are_of_what_is_left(engine: EngineProcess, model: PreTrainedModel) -> None:
    sampling = Sampling(max_tokens=24, temperature=0.9, top_p=0.8, top_k=20, ignore_eos=True)
    assert sampling.truncated and not FREE.truncated
    prompt = prompts(3)[2]
    for sample in generate(engine, requests_of([prompt], 4), sampling).values():
        for row, token, logprob in zip(
            reference_logprobs(model, prompt.tokens, sample.tokens, 0.9), sample.tokens, sample.logprobs, strict=True
        ):
            order = np.argsort(-row)[:20]
            kept = np.exp(row[order]) / np.exp(row[order]).sum()
            order = order[: int(np.searchsorted(np.cumsum(kept), 0.8)) + 1]
            assert token in order
            assert logprob == pytest.approx(row[token] - np.log(np.exp(row[order]).sum()), abs=ATOL)


def test_draws_follow_the_distribution(engine: EngineProcess, model: PreTrainedModel) -> None:
    """2,000 first tokens against their probabilities: chi-squared, over the tokens expected at least ten times."""
    prompt = prompts(1)[0]
    count = 2000
    samples = generate(engine, requests_of([prompt], count), Sampling(max_tokens=1, ignore_eos=True))
    seen = np.bincount([sample.tokens[0] for sample in samples.values()], minlength=rollouts.VOCAB)
    expected = count * np.exp(reference_logprobs(model, prompt.tokens, [0])[0])
    often = expected >= 10
    statistic = float((((seen - expected) ** 2) / expected)[often].sum())
    degrees = int(often.sum())
    assert degrees > 20
    assert statistic < degrees + 5 * np.sqrt(2 * degrees)  # five standard deviations


@pytest.mark.tier("test")
def test_a_sample_depends_on_nothing_that_runs_beside_it(engine: EngineProcess) -> None:
    """All at once, in the other order, one by one, and again: bit for bit the same tokens."""
    requests = requests_of(prompts(5), 3)
    expected = generate(engine, requests, FREE)
    assert len({tuple(sample.tokens) for sample in expected.values()}) == len(requests)
    again = generate(engine, requests, FREE)
    backwards = generate(engine, requests[::-1], FREE)
    alone = {key: sample for request in requests for key, sample in generate(engine, [request], FREE).items()}
    for samples in (again, backwards, alone):
        assert_same(samples, expected, ATOL)
    other_seed = generate(engine, requests, Sampling(max_tokens=24, ignore_eos=True, seed=4))
    assert all((other_seed[key].tokens != sample.tokens).any() for key, sample in expected.items())


def test_samples_of_a_prompt_share_its_cache(engine: EngineProcess) -> None:
    async def run() -> dict[tuple[str, int], Sample]:
        await engine.start_update()
        await engine.finish_update(4)  # which forgets the prefix cache
        return await collect(engine, requests_of([Prompt(id="long", tokens=tuple(range(3, 83)) * 2)], 4), FREE)

    first, *others = (sample.cached_tokens for _, sample in sorted(asyncio.run(run()).items()))
    assert first == 0 and others == [128] * 3  # of 160: whole blocks, which have 128 tokens on the CPU


def test_prompts_of_more_tokens_than_one_step_takes(engine: EngineProcess, model: PreTrainedModel) -> None:
    """vLLM would cut the prompt on the border of a step in two, and end the engine over its seed."""
    given = [Prompt(id=f"n{i}", tokens=tuple((7 * i + 3 * j) % 98 + 3 for j in range(190))) for i in range(50)]
    samples = generate(engine, requests_of(given, 1), Sampling(max_tokens=2, ignore_eos=True))
    for prompt in given[::7]:
        sample = samples[prompt.id, 0]
        expected = chosen(reference_logprobs(model, prompt.tokens, sample.tokens), sample.tokens)
        np.testing.assert_allclose(sample.logprobs, expected, rtol=0, atol=ATOL)


def test_what_ends_a_response(engine: EngineProcess) -> None:
    requests = requests_of(prompts(4), 8)
    whole = generate(engine, requests, FREE)
    assert all(s.finish is FinishReason.length and s.stop is None for s in whole.values())
    by_eos = generate(engine, requests, Sampling(max_tokens=24, seed=3))
    ended = 0
    for key, sample in by_eos.items():
        at = np.flatnonzero(whole[key].tokens == EOS)
        length = at[0] + 1 if len(at) else 24
        np.testing.assert_array_equal(sample.tokens, whole[key].tokens[:length])
        assert sample.finish is (FinishReason.stop if len(at) else FinishReason.length) and sample.stop is None
        ended += len(at) > 0
    assert ended >= 3
    key = requests[0].key
    token = int(whole[key].tokens[9])
    first = int(np.flatnonzero(whole[key].tokens == token)[0])
    stopped = generate(engine, requests[:1], Sampling(max_tokens=24, ignore_eos=True, seed=3, stop_token_ids=(token,)))
    assert stopped[key].finish is FinishReason.stop and stopped[key].stop == token
    np.testing.assert_array_equal(stopped[key].tokens, whole[key].tokens[: first + 1])


def test_a_stop_string_is_cut_from_the_text_and_not_from_the_tokens(engine: EngineProcess) -> None:
    (request,) = requests_of(prompts(1), 1)
    whole = generate(engine, [request], FREE)[request.key]
    words = whole.text.split()
    assert words == [f"w{token}" for token in whole.tokens if token != EOS]
    stop = f"{words[5]} {words[6]} "
    stopped = generate(engine, [request], Sampling(max_tokens=24, ignore_eos=True, seed=3, stop=(stop,)))[request.key]
    assert stopped.finish is FinishReason.stop and stopped.stop == stop
    assert stopped.text.split() == words[:5]
    np.testing.assert_array_equal(stopped.tokens, whole.tokens[: len(stopped.tokens)])
    assert len(words[:7]) <= len(stopped.tokens) < len(whole.tokens)


def test_a_stop_string_ends_a_response_that_goes_on_wherever_it_was_interrupted(engine: EngineProcess) -> None:
    (request,) = requests_of(prompts(1), 1)
    greedy = Sampling(max_tokens=24, ignore_eos=True, temperature=0)
    words = generate(engine, [request], greedy)[request.key].text.split()
    stopping = replace(greedy, stop=(f"{words[5]} {words[6]} {words[7]}",))
    whole = generate(engine, [request], stopping)[request.key]
    assert whole.stop == stopping.stop[0] and len(whole.tokens) > 3
    on = [
        Request(
            prompt=request.prompt,
            index=cut,
            so_far=replace(
                whole,
                tokens=whole.tokens[:cut],
                logprobs=whole.logprobs[:cut],
                versions=(VersionSpan(version=4, start=0, end=cut),),
                finish=FinishReason.abort,
                text=" ".join(f"w{token}" for token in whole.tokens[:cut]),
            ),
        )
        for cut in range(1, len(whole.tokens))
    ]
    for sample in generate(engine, on, stopping).values():
        np.testing.assert_array_equal(sample.tokens, whole.tokens)
        assert (sample.text.split(), sample.stop) == (whole.text.split(), whole.stop)
        assert sample.finish is FinishReason.stop and sample.versions[-1].end == len(whole.tokens)


def test_an_aborted_sample_is_given_as_far_as_it_came_and_can_go_on(
    engine: EngineProcess, model: PreTrainedModel
) -> None:
    long = Sampling(max_tokens=LONG, ignore_eos=True, seed=3)
    kept, ended = requests_of(prompts(2), 1)

    async def run() -> dict[tuple[str, int], Sample]:
        task = asyncio.create_task(collect(engine, [kept, ended], long))
        await until_running(engine, 2)
        await collect(engine, [Request(prompt=kept.prompt, index=9)], Sampling(max_tokens=8, ignore_eos=True))
        await engine.abort([ended.key])
        return await task

    samples = asyncio.run(run())
    partial = samples[ended.key]
    assert samples[kept.key].finish is FinishReason.length
    assert partial.finish is FinishReason.abort and 0 < len(partial.tokens) < LONG
    going_on = Request(prompt=ended.prompt, so_far=partial)
    whole = generate(engine, [going_on], long)[ended.key]
    np.testing.assert_array_equal(whole.tokens[: len(partial.tokens)], partial.tokens)
    assert len(whole.tokens) == whole.versions[-1].end == LONG
    expected = chosen(reference_logprobs(model, ended.prompt.tokens, whole.tokens), whole.tokens)
    np.testing.assert_allclose(whole.logprobs, expected, rtol=0, atol=ATOL)


def test_paused_samples_go_on_where_they_were(engine: EngineProcess) -> None:
    requests = requests_of(prompts(3), 4)
    long = Sampling(max_tokens=LONG, ignore_eos=True, seed=5)
    expected = generate(engine, requests, long)

    async def run() -> dict[tuple[str, int], Sample]:
        task = asyncio.create_task(collect(engine, requests, long))
        await until_running(engine, len(requests))
        await engine.pause(Pause.keep)
        drawn = (await engine.statistics()).generated_tokens
        await asyncio.sleep(0.3)  # for what must not happen
        assert not task.done() and (await engine.statistics()).generated_tokens == drawn
        await engine.resume()
        return await task

    assert_same(asyncio.run(run()), expected, ATOL)


def test_every_token_knows_the_version_that_drew_it(engine: EngineProcess) -> None:
    """An update in the middle of generation, here of nothing but the version."""
    requests = requests_of(prompts(2), 4)
    long = Sampling(max_tokens=LONG, ignore_eos=True, seed=6)

    async def run() -> dict[tuple[str, int], Sample]:
        assert await engine.version() == 4
        task = asyncio.create_task(collect(engine, requests, long))
        await until_running(engine, len(requests))
        await engine.start_update()
        with pytest.raises(RolloutError, match="rollout-0 does not generate: its weights are being updated"):
            await collect(engine, requests[:1], FREE)
        await engine.finish_update(5)
        samples = await task
        assert await engine.version() == 5
        return samples

    samples = asyncio.run(run())
    for sample in samples.values():
        assert [span.version for span in sample.versions] == [4, 5]
        old, new = sample.versions
        assert old == VersionSpan(version=4, start=0, end=new.start) and 0 < new.start < new.end == LONG
    asyncio.run(engine.start_update())
    asyncio.run(engine.finish_update(4))
    assert_same(generate(engine, requests, long), samples, ATOL)  # the weights are the same, after all


def test_a_failed_update_leaves_the_engine_refusing_until_one_succeeds(engine: EngineProcess) -> None:
    requests = requests_of(prompts(2), 1)

    async def run() -> None:
        task = asyncio.create_task(collect(engine, requests, Sampling(max_tokens=LONG, ignore_eos=True)))
        await until_running(engine, len(requests))
        await engine.start_update()
        await engine.fail_update("rank 1 is out of memory")
        assert {sample.finish for sample in (await task).values()} == {FinishReason.abort}
        for verb in (collect(engine, requests, FREE), engine.resume()):
            with pytest.raises(RolloutError, match=r"failed \(rank 1 is out of memory\)\. Send all weights again"):
                await verb
        await engine.start_update()
        await engine.finish_update(4)

    asyncio.run(run())
    assert len(generate(engine, requests, FREE)) == 2


def test_wrong_prompts_are_refused_together_and_the_engine_goes_on(engine: EngineProcess) -> None:
    wrong = [
        Prompt(id="none", tokens=()),
        Prompt(id="long", tokens=(5,) * 201),
        Prompt(id="strange", tokens=(5, 101)),
    ]
    with pytest.raises(RolloutError) as error:
        generate(engine, requests_of([*prompts(1), *wrong], 2), Sampling(max_tokens=LONG + 1))
    for said in (
        "max_tokens=301 must lie between 1 and rollout.max_response_length=300",
        "prompt none is empty. Drop it",
        "prompt long has 201 tokens, with max_tokens=301 more than the 500 that rollout.max_prompt_length=200 and",
        "prompt strange has token 101, and the model's vocabulary has 101",
    ):
        assert str(error.value).count(said) == 1
    assert len(generate(engine, requests_of(prompts(1), 1), FREE)) == 1


def no_such_method(worker: object) -> None:
    """Of no worker."""


def test_what_a_worker_raises_is_said(engine: EngineProcess) -> None:
    with pytest.raises(RolloutError, match=r"rollout-0 failed while running no_such_method: .*no_such_method"):
        asyncio.run(engine.call_workers(no_such_method))
    assert asyncio.run(engine.call_workers(rollouts.check_health)) == [None]


def test_leaving_early_aborts_the_rest_and_the_books_are_kept(engine: EngineProcess) -> None:
    async def run() -> None:
        before = await engine.statistics()
        samples = engine.generate(requests_of(prompts(2), 30), Sampling(max_tokens=64))
        await anext(samples)
        await samples.aclose()  # type: ignore[attr-defined]
        while (await engine.statistics()).running:  # as of the last step: until they are aborted
            await collect(engine, requests_of(prompts(1), 1), FREE)
        collected = await collect(engine, requests_of(prompts(1), 1), FREE)
        after = await engine.statistics()
        assert len(collected) == 1 and after.running == after.waiting == 0
        assert 24 < after.generated_tokens - before.generated_tokens < 60 * 64
        assert after.tokens_per_s > 0 and after.kv_cache_usage < 0.01

    asyncio.run(run())


def test_sleep_and_wake_lose_nothing(engine: EngineProcess) -> None:
    requests = requests_of(prompts(2), 1)
    expected = generate(engine, requests, FREE)

    async def run() -> dict[tuple[str, int], Sample]:
        await engine.sleep()
        await engine.wake(EngineMemory.weights)
        asleep = asyncio.ensure_future(collect(engine, requests, FREE))
        done, _ = await asyncio.wait([asleep], timeout=0.5)
        assert not done, "it generates without its cache"
        await engine.wake(EngineMemory.kv_cache)
        return await asleep

    assert_same(asyncio.run(run()), expected, ATOL)
