"""What the meter counts of single operations, beside sizes known by hand and numbers that torch itself gives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from mcore_rl.rehearsal.ledger import Ledger, MemoryKind
from mcore_rl.rehearsal.meter import DEVICE, DeviceMeter


@contextmanager
def metered() -> Iterator[DeviceMeter]:
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    meter = DeviceMeter(fake)
    with fake, meter, meter.phase("work"):
        yield meter


def living(ledger: Ledger) -> int:
    return sum(block.num_bytes for block in ledger.living(ledger.now))


def reads(ledger: Ledger) -> list[str]:
    return [read.operation for read, count in ledger.reads.items() for _ in range(count)]


def test_memory_is_that_of_storages_while_they_live() -> None:
    with metered() as meter:
        x = torch.empty(10, 100, device=DEVICE)
        view = x.t()[:5]
        assert living(meter.ledger) == 4000, "a view has no memory of its own"
        y = x.to(torch.bfloat16) @ torch.ones(100, 7, dtype=torch.bfloat16, device=DEVICE)
        assert living(meter.ledger) == 4000 + 2 * 70, "operands of the product are gone"
        x += 1
        assert living(meter.ledger) == 4000 + 2 * 70
        del x, y
        assert living(meter.ledger) == 4000, "the view keeps the storage"
        del view
        assert living(meter.ledger) == 0
    peak = meter.ledger.peak(meter.ledger.phases[0])
    assert peak.num_bytes == 4000 + 2000 + 1400 + 140


def test_results_have_the_shapes_that_torch_gives() -> None:
    """Each twice: the second is remembered."""

    def results(device: torch.device) -> list[torch.Tensor]:
        x = torch.ones(6, 8, device=device)
        out = []
        for _ in range(2):
            out += [x @ x.t(), x.t() * 2, x.sum(0), x.sum(1, keepdim=True), x.to(torch.float64), x.tril(), x > 0]
            out += [torch.cat([x, x]), *x.split(2), x[1:3].clone(), torch.logsumexp(x, 1), x.unflatten(1, (2, 4)) + 1]
            out += [x.mul_(2), x.double().mul_(2), torch.softmax(x, -1), x.new_zeros(3), x.topk(2).indices]
            out += [x + 1, x + True, x / 2, x.long() + 1, x.long() + 1.0]
        return out

    with metered():
        fake = results(DEVICE)
    for ours, theirs in zip(fake, results(torch.device("cpu")), strict=True):
        assert isinstance(ours, FakeTensor)
        assert ours.device == DEVICE
        assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)


def test_the_host_is_real_and_does_not_mix_with_the_device() -> None:
    with metered() as meter:
        host = torch.arange(4)
        assert not isinstance(host, FakeTensor)
        assert host.tolist() == [0, 1, 2, 3]
        device = host.to(DEVICE)
        assert isinstance(device, FakeTensor)
        assert living(meter.ledger) == 32
        with pytest.raises(RuntimeError, match="same device"):
            device + host
        assert (device + torch.tensor(1)).device == DEVICE, "a number of the host may take part"
        assert reads(meter.ledger) == []


def test_reads_of_the_device_are_counted_with_their_place() -> None:
    with metered() as meter:
        x = torch.ones(4, device=DEVICE)
        assert bool((x > 0).all())
        x.cpu()
        torch.zeros(4).copy_(x)
        x[x > 0]
        x.masked_select(x > 0)
        (x > 0).nonzero()
        x[x > 0] = torch.ones(4, device=DEVICE)
        x[x > 0] = 0.0  # a masked fill: nobody waits
        torch.where(x > 0, x, 0)
    expected = ["item", "copy to the host", "copy to the host", "index.Tensor", "masked_select", "nonzero"]
    assert reads(meter.ledger) == [*expected, "index_put_.default"]


def test_a_number_that_the_host_sent_comes_back() -> None:
    with metered() as meter:
        assert int(torch.tensor(3).to(DEVICE)) == 3
        assert reads(meter.ledger) == ["item"]


def test_what_autograd_keeps_is_activations() -> None:
    with metered() as meter, torch.autograd.graph.saved_tensors_hooks(meter.keep, lambda tensor: tensor):
        x = torch.ones(10, device=DEVICE, requires_grad=True)
        kept, dropped = (x * 1).exp(), (x * 1) + 1
        by_kind = meter.ledger.by_kind(meter.ledger.now)
        assert by_kind[MemoryKind.activations] == 40, "the output of exp, which its backward reads"
        assert by_kind[MemoryKind.temporary] == 80, "the leaf, and the sum, which nobody reads again"
        (kept.sum() + dropped.sum()).backward()
        assert x.grad is not None
        assert x.grad.device == DEVICE


def test_operations_are_those_of_matrix_products() -> None:
    with metered() as meter:
        x = torch.ones(6, 8, device=DEVICE, requires_grad=True)
        (x @ torch.ones(8, 4, device=DEVICE, requires_grad=True)).sum().backward()
    assert meter.ledger.flops("work") == 3 * 2 * 6 * 8 * 4
