"""Minibatches for losses, and what becomes of them when they are cut into microbatches and over context ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mcore_rl.ground.types import LossInputs, LossSums

Loss = Callable[[LossInputs], LossSums]
FIELDS = (
    "logprobs", "entropy", "values", "old_logprobs", "ref_logprobs", "advantages", "returns", "old_values", "weights",
    "full_kl", "divergence", "selection",
)  # fmt: skip
LEAVES = ("logprobs", "entropy", "values", "full_kl", "divergence")  # what a forward pass makes


@dataclass(frozen=True)
class Minibatch:
    """fields: [T] each; ``LEAVES`` take the gradient.  extra: [S] each.  pairs: the preferred sequence first."""

    lengths: tuple[int, ...]
    mask: Tensor
    fields: dict[str, Tensor]
    extra: dict[str, Tensor] = field(default_factory=dict)
    pairs: tuple[tuple[int, int], ...] | None = None

    @property
    def sequence(self) -> Tensor:
        return torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths))

    def without(self, *names: str) -> Minibatch:
        return replace(self, fields={name: x for name, x in self.fields.items() if name not in names})

    def gradients(self, loss: Tensor) -> list[Tensor]:
        """With respect to each leaf; zeros where the loss does not depend on it."""
        leaves = [self.fields[name] for name in LEAVES if name in self.fields]
        return list(torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True, materialize_grads=True))


def drawn(seed: int, lengths: Sequence[int] = (5, 1, 7, 4), dtype: torch.dtype = torch.float64) -> Minibatch:
    """Ratios far enough from 1 to meet every clip; masks have holes, the last sequence is not trained.

    A first sequence of two tokens trains exactly one."""
    random = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(num_tokens, generator=random, dtype=torch.float64)

    logprobs = normal(1) - 2
    fields = {
        "logprobs": logprobs,
        "entropy": normal(1).abs(),
        "values": normal(1),
        "old_logprobs": logprobs + normal(0.6),
        "ref_logprobs": logprobs + normal(0.6),
        "advantages": normal(1),
        "returns": normal(1),
        "old_values": normal(1),
        "weights": normal(1).abs(),
    }
    fields["full_kl"] = fields["values"].square()
    fields["divergence"] = fields["returns"].square()
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = torch.rand(num_tokens, generator=random) < 0.8
    mask[[sum(lengths[:index]) for index in range(len(lengths))]] = False
    mask &= sequence != len(lengths) - 1
    mask[1] = True
    fields["selection"] = normal(1)
    moved = {name: x.to(dtype).requires_grad_(name in LEAVES) for name, x in fields.items()}
    return Minibatch(tuple(lengths), mask, moved)


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """Every way to cut ``items`` into microbatches."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for smaller in partitions(rest):
        yield [[first], *smaller]
        for index, microbatch in enumerate(smaller):
            yield [*smaller[:index], [first, *microbatch], *smaller[index + 1 :]]


def _rows(minibatch: Minibatch, members: list[int], sum_over_context: Callable, keep: Tensor) -> LossInputs:  # type: ignore[type-arg]
    """The rows of sequences ``members`` where ``keep``, among three rows of padding."""
    places = torch.cat([(minibatch.sequence == m).nonzero().squeeze(1) for m in members] or [torch.zeros(0).long()])
    slots = torch.cat([torch.full((minibatch.lengths[m],), slot) for slot, m in enumerate(members)] or [places])
    slots, places = slots[keep[places]], places[keep[places]]
    nowhere = torch.full((1,), -1)
    slots = torch.cat([nowhere, slots, nowhere, nowhere]).long()
    here = slots >= 0

    def at_rows(x_T: Tensor) -> Tensor:
        return x_T.new_zeros(len(slots)).masked_scatter(here, x_T[places])

    return LossInputs(
        mask_N=at_rows(minibatch.mask),
        sequence_N=slots,
        num_sequences=len(members),
        sum_over_context=sum_over_context,
        extra_S={name: x_S[members] for name, x_S in minibatch.extra.items()},
        pairs_P2=_pairs_among(minibatch, members),
        **{f"{name}_N": at_rows(x_T) for name, x_T in minibatch.fields.items()},  # type: ignore[arg-type]
    )


def _pairs_among(minibatch: Minibatch, members: list[int]) -> Tensor | None:
    """The pairs of sequences ``members`` by their numbers there; fails where one is without its other."""
    if minibatch.pairs is None:
        return None
    there = [pair for pair in minibatch.pairs if set(pair) & set(members)]
    return torch.tensor([[members.index(each) for each in pair] for pair in there]).long().view(-1, 2)


def whole(minibatch: Minibatch, members: list[int] | None = None) -> LossInputs:
    members = list(range(len(minibatch.lengths))) if members is None else members
    return _rows(minibatch, members, lambda x: x, torch.ones(len(minibatch.mask), dtype=torch.bool))


def over_microbatches(loss: Loss, minibatch: Minibatch, microbatches: list[list[int]]) -> LossSums:
    return _added([loss(whole(minibatch, members)) for members in microbatches])


def over_context(loss: Loss, minibatch: Minibatch, seed: int) -> LossSums:
    """Two ranks that hold a random part of the rows each and meet in every sum, one thread a rank and one graph."""
    mine = torch.rand(len(minibatch.mask), generator=torch.Generator().manual_seed(seed)) < 0.5
    meeting, brought = threading.Barrier(2, timeout=60), [torch.zeros(()), torch.zeros(())]
    results: list[LossSums | BaseException] = [RuntimeError("not run"), RuntimeError("not run")]

    def work(rank: int) -> None:
        def sum_over_context(x: Tensor) -> Tensor:
            brought[rank] = x
            meeting.wait()
            total = brought[0] + brought[1]
            meeting.wait()
            return total

        try:
            members = list(range(len(minibatch.lengths)))
            results[rank] = loss(_rows(minibatch, members, sum_over_context, mine if rank else ~mine))
        except BaseException as error:  # noqa: BLE001 - raised again where the test is
            meeting.abort()
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return _added([result for result in results if isinstance(result, LossSums)])


def _added(parts: list[LossSums]) -> LossSums:
    assert all(part.metrics.keys() == parts[0].metrics.keys() for part in parts)
    metrics = {name: torch.stack([part.metrics[name] for part in parts]).sum() for name in parts[0].metrics}
    maxima = {name: torch.stack([part.maxima[name] for part in parts]).max() for name in parts[0].maxima}
    return LossSums(total=torch.stack([part.total for part in parts]).sum(), metrics=metrics, maxima=maxima)


def assert_no_cut_changes(loss: Loss, minibatch: Minibatch, units: Sequence[Sequence[int]], seeds: int) -> None:
    """Neither cuts into microbatches of any number, one of them empty, nor rows over two context ranks change the sums.

    units: sequences that stay together.  seeds: how often rows are spread over the ranks.
    """
    reference = loss(whole(minibatch))
    for microbatches in partitions(list(range(len(units)))):
        cut = [sorted(sequence for unit in chosen for sequence in units[unit]) for chosen in microbatches]
        assert_same(minibatch, over_microbatches(loss, minibatch, [*cut, []]), reference)
    for seed in range(seeds):
        assert_same(minibatch, over_context(loss, minibatch, seed), reference)


def assert_connected_zero(loss: Loss, minibatch: Minibatch, members: list[int]) -> None:
    """A microbatch of ``members`` adds nothing to loss, gradients and metrics, and takes part in the graph."""
    sums = loss(whole(minibatch, members))
    assert float(sums.total.detach()) == 0 and sums.total.requires_grad
    assert not any(gradient.any() for gradient in minibatch.gradients(sums.total))
    assert not any(value.any() for value in sums.metrics.values())


def assert_untrained_rows_reach_nothing(loss: Loss, clean: Minibatch) -> None:
    """Neither -inf nor nan in every field at the rows that are not trained changes loss or gradients."""
    reference = loss(whole(clean))
    for poison in (-torch.inf, torch.nan):
        fields = {
            name: x.detach().masked_fill(~clean.mask, poison).requires_grad_(x.requires_grad)
            for name, x in clean.fields.items()
        }
        broken = replace(clean, fields=fields)
        sums = loss(whole(broken))
        torch.testing.assert_close(sums.total, reference.total)
        for mine, theirs in zip(broken.gradients(sums.total), clean.gradients(reference.total), strict=True):
            torch.testing.assert_close(mine, theirs)


def assert_same(minibatch: Minibatch, first: LossSums, second: LossSums) -> None:
    """Totals, metrics and gradients up to the order of float64 sums."""
    close = dict(atol=1e-11, rtol=1e-11)
    torch.testing.assert_close(first.total, second.total, **close)
    assert first.metrics.keys() == second.metrics.keys()
    for name, value in first.metrics.items():
        torch.testing.assert_close(value, second.metrics[name], **close, msg=name)
    assert first.maxima.keys() == second.maxima.keys()
    for name, value in first.maxima.items():
        assert torch.equal(value, second.maxima[name]), name
    one, other = minibatch.gradients(first.total), minibatch.gradients(second.total)
    for mine, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(mine, theirs, **close)
