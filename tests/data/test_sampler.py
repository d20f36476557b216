"""The sampler: every prompt once an epoch, no prompt twice in a batch, and exact resumption from anywhere."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from mcore_rl.data.sampler import PromptSampler
from mcore_rl.ground.errors import ConfigError


def draws(sampler: PromptSampler, counts: list[int]) -> list[list[int]]:
    return [sampler.next(count) for count in counts]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("num_prompts", "count"), [(10, 5), (10, 3), (10, 7), (7, 7), (1, 1), (11, 10), (23, 22)])
def test_epochs_hold_every_prompt_once_and_batches_none_twice(num_prompts: int, count: int, shuffle: bool) -> None:
    sampler = PromptSampler(num_prompts, seed=3, shuffle=shuffle)
    batches = draws(sampler, [count] * (4 * num_prompts))
    assert all(len(set(batch)) == count for batch in batches)
    stream = [index for batch in batches for index in batch]
    for start in range(0, len(stream), num_prompts):
        epoch = stream[start : start + num_prompts]
        if len(epoch) == num_prompts:
            assert sorted(epoch) == list(range(num_prompts)), start


def test_without_shuffle_the_order_is_the_file_s() -> None:
    assert draws(PromptSampler(5, 0, False), [3, 3, 3]) == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]


def test_orders_differ_between_epochs_and_seeds_and_are_the_same_on_every_machine() -> None:
    first, second = draws(PromptSampler(100, 1, True), [100, 100])
    other = PromptSampler(100, 2, True).next(100)
    assert len({tuple(order) for order in (first, second, other)}) == 3
    assert PromptSampler(8, 1, True).next(8) == [2, 4, 7, 5, 0, 6, 3, 1]  # a run of last year continues


def test_every_place_of_an_order_is_equally_likely() -> None:
    """Prompt 0 of 4, first in 2,000 epochs: 500 of 2,000 with a standard deviation of 19; six of them are allowed."""
    sampler = PromptSampler(4, 0, True)
    first = Counter(batch[0] for batch in draws(sampler, [4] * 2_000))
    assert all(abs(count - 500) < 6 * 19 for count in first.values())


@pytest.mark.parametrize("shuffle", [True, False])
def test_what_was_saved_anywhere_goes_on_the_same_way(shuffle: bool) -> None:
    counts = [3, 5, 1, 10, 4, 7, 10, 2, 9, 6, 8, 3, 3, 3]
    whole = draws(PromptSampler(11, 5, shuffle), counts)
    for stop in range(len(counts)):
        saved = PromptSampler(11, 5, shuffle)
        draws(saved, counts[:stop])
        state = json.loads(json.dumps(saved.state_dict()))  # as a checkpoint keeps it
        resumed = PromptSampler(11, 5, shuffle)
        resumed.next(7)
        resumed.load_state_dict(state)
        assert resumed.epoch == saved.epoch
        assert resumed.state_dict() == state
        assert draws(resumed, counts[stop:]) == whole[stop:], stop


def test_a_state_is_a_copy() -> None:
    sampler = PromptSampler(10, 0, True)
    draws(sampler, [7, 7])
    state = sampler.state_dict()
    kept = json.loads(json.dumps(state))
    draws(sampler, [7, 7])
    assert state == kept


def test_the_epoch_counts() -> None:
    sampler = PromptSampler(4, 0, True)
    epochs = []
    for _ in range(5):
        sampler.next(3)
        epochs.append(sampler.epoch)
    assert epochs == [0, 1, 2, 2, 3]  # 3, 6, 9, 12 (all of three epochs, the fourth not begun) and 15 prompts


def test_a_state_of_other_data_is_refused_with_everything_that_differs() -> None:
    state = PromptSampler(10, 1, True).state_dict()
    with pytest.raises(ConfigError) as caught:
        PromptSampler(12, 2, False).load_state_dict(state)
    said = str(caught.value)
    assert "3 problems" in said
    assert "data.train_files=12 prompts: the checkpoint was made with 10 prompts" in said
    assert "data.seed=2: the checkpoint was made with 1 as the seed" in said
    assert "data.shuffle=False: the checkpoint was made with True as shuffle" in said
    assert "trainer.resume_mode=off" in said


def test_batches_per_epoch() -> None:
    sampler = PromptSampler(10, 1, True)
    assert [sampler.batches_per_epoch(size) for size in (1, 3, 5, 10)] == [10, 3, 2, 1]
    with pytest.raises(ConfigError, match=r"data\.gen_batch_size=11: is more than the 10 prompts.*Write 10 or less"):
        sampler.batches_per_epoch(11, "data.gen_batch_size")


def test_what_was_given_back_is_drawn_first_in_its_own_epoch() -> None:
    sampler = PromptSampler(4, 0, shuffle=False)
    taken = sampler.next_of_epochs(3) + sampler.next_of_epochs(3)
    assert taken == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)] and sampler.num_drawn == 6
    state = json.loads(json.dumps(sampler.state_with([(0, 2), (1, 0)])))
    resumed = PromptSampler(4, 0, shuffle=False)
    resumed.load_state_dict(state)
    assert resumed.num_drawn == 4 and resumed.drawn == [1] and resumed.state_dict() == state
    assert resumed.next_of_epochs(1) == [(0, 2)]
    assert resumed.state_with([(0, 2)]) == state, "those that are still to come stay behind those of now"
    assert resumed.next_of_epochs(3) == [(1, 0), (1, 2), (1, 3)]
    assert resumed.state_dict() == state | {"position": 4, "again": []} and resumed.num_drawn == 8
    assert Counter([*taken, (1, 2), (1, 3)]) == Counter((epoch, index) for epoch in (0, 1) for index in range(4))


def test_a_state_without_returned_places_is_read() -> None:
    state = PromptSampler(4, 0, False).state_dict()
    del state["again"]
    sampler = PromptSampler(4, 0, False)
    sampler.load_state_dict(state)  # of a checkpoint of an earlier release
    assert sampler.next(2) == [0, 1]
