"""The tables that a ledger makes of its events, by hand."""

from __future__ import annotations

from mcore_rl.rehearsal.ledger import Collective, Ledger, MemoryBlock, MemoryKind, RehearsalPhase

FIRST, SECOND = RehearsalPhase("first", 0, 5), RehearsalPhase("second", 5, 10)


def ledger() -> Ledger:
    """Parameters live throughout; three temporaries come and go: 10 at [2, 4), 30 at [3, 6), 20 at [7, 9)."""
    return Ledger(
        blocks=[
            MemoryBlock(100, 1, "empty", "x.py:1 f", MemoryKind.parameters),
            MemoryBlock(10, 2, "mm", "x.py:2 f", death=4),
            MemoryBlock(30, 3, "mm", "x.py:3 f", MemoryKind.activations, death=6),
            MemoryBlock(20, 7, "mm", "x.py:2 f", death=9),
        ],
        phases=[FIRST, SECOND],
        now=10,
    )


def test_the_peak_of_a_phase_is_its_greatest_moment() -> None:
    first, second = (ledger().peak(phase) for phase in (FIRST, SECOND))
    assert (first.num_bytes, first.at) == (140, 3)
    assert first.by_kind[MemoryKind.temporary] == 10
    assert first.by_kind[MemoryKind.activations] == 30
    assert second.num_bytes == 130, "what lived when the phase began counts"
    assert second.at == 5


def test_what_lives_at_a_moment_is_summed_by_place() -> None:
    assert ledger().largest(3, 2) == [
        (MemoryKind.parameters, "empty", "x.py:1 f", 1, 100),
        (MemoryKind.activations, "mm", "x.py:3 f", 1, 30),
    ]
    assert [block.num_bytes for block in ledger().living(6)] == [100]


def test_the_timeline_keeps_the_greatest_moment_of_each_stretch() -> None:
    samples = ledger().timeline([FIRST, SECOND], 2)
    assert [sum(sample.by_kind.values()) for sample in samples] == [140, 120]
    assert [sample.phase for sample in samples] == ["first", "second"]
    assert ledger().timeline([], 2) == []


def test_traffic_adds_up_and_operations_of_microbatches_are_multiplied() -> None:
    counted = ledger()
    key = Collective("first", "tp", 2, "all-reduce", per_step=False)
    counted.send(key, 100, 100)
    counted.send(key, 50, 50)
    assert (counted.traffic[key].calls, counted.traffic[key].wire) == (2, 150)
    counted.operations["first", True, "mm"] += 5
    counted.operations["first", False, "mm"] += 7
    assert counted.flops("first", microbatches=3) == 5 + 21
    assert counted.flops("second") == 0
