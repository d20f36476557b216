"""The calls to torch that copies on a stream make, in their order; tests/gpu makes real ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
import torch

from mcore_rl.config.engine import Device
from mcore_rl.parallel.copies import HostCopies, StreamCopies, copies_of
from mcore_rl.parallel.device import detect


@dataclass
class Recorder:
    """Stands in for ``torch.cuda``: two streams, and the calls."""

    calls: list[str] = field(default_factory=list)
    running: str = "current"
    num_streams: int = 0

    def __post_init__(self) -> None:
        self.current = FakeStream(self, "current")

    def Stream(self) -> FakeStream:
        self.num_streams += 1
        return FakeStream(self, "side")

    def current_stream(self) -> FakeStream:
        return self.current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.running = self.running, stream.name
        yield
        self.running = before


@dataclass
class FakeStream:
    torch_cuda: Recorder
    name: str

    def wait_stream(self, other: FakeStream) -> None:
        self.torch_cuda.calls.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> FakeEvent:
        self.torch_cuda.calls.append(f"event on {self.name}")
        return FakeEvent(self.torch_cuda)

    def wait_event(self, event: FakeEvent) -> None:
        self.torch_cuda.calls.append(f"{self.name} waits for the event")


@dataclass
class FakeEvent:
    torch_cuda: Recorder

    def synchronize(self) -> None:
        self.torch_cuda.calls.append("the host waits for the event")

    def query(self) -> bool:
        return False


@dataclass
class FakeTensor:
    torch_cuda: Recorder

    def copy_(self, source: object, *, non_blocking: bool) -> None:
        self.torch_cuda.calls.append(f"copy on {self.torch_cuda.running}, non_blocking={non_blocking}")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    for name in ("Stream", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    return made


def test_copies_wait_for_what_was_computed_and_run_on_a_stream_of_their_own(recorder: Recorder) -> None:
    copies, tensor = StreamCopies(), FakeTensor(recorder)
    copied = copies.start([(tensor, tensor), (tensor, tensor)])  # type: ignore[list-item]
    assert recorder.calls == [
        "side waits for current",
        "copy on side, non_blocking=True",
        "copy on side, non_blocking=True",
        "event on side",
    ]
    recorder.calls.clear()
    assert not copied.done() and not recorder.calls
    copied.order()
    copied.wait()
    assert recorder.calls == ["current waits for the event", "the host waits for the event"]
    copies.start([])
    assert recorder.num_streams == 1, "copies of one engine come one after another"


def test_a_platform_without_devices_copies_at_once() -> None:
    cpu = detect(Device.cpu)
    copies, target = copies_of(cpu), torch.zeros(3)
    assert isinstance(copies, HostCopies) and isinstance(copies_of(replace(cpu, kind=Device.cuda)), StreamCopies)
    copied = copies.start([(target, torch.ones(3))])
    assert copied.done() and target.tolist() == [1.0] * 3
    copied.wait(), copied.order()
