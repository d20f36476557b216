"""The workers' side without an engine: answers instead of errors, the refusal, and weights packed and unpacked.

What an engine does with it is proven in tests/sync, with real trainers.
"""

from __future__ import annotations

import pickle
from concurrent.futures import ProcessPoolExecutor

import pytest

from mcore_rl.ground.errors import SyncError
from mcore_rl.rollout.vllm.worker_methods import answer_of
from tests.support.forked import ENGINES
from tests.support.skips import KERNEL

SHAPES = ((64, 96), (64, 64), (48, 64))  # of one expert: (intermediate, hidden); the last is padded


def _in_a_worker() -> dict[str, object]:
    """Everything that needs vLLM, in a process that it may have."""
    import torch

    from mcore_rl.ground.errors import RolloutError
    from mcore_rl.rollout.vllm.receiver.worker_extension import WeightReceiver

    worker = WeightReceiver()
    observed: dict[str, object] = {"no channel": worker.sync_fingerprints()}

    class Incoming:
        def begin(self, version: int) -> None:
            raise ValueError("no route")

        def failed(self, error: BaseException, doing: str) -> SyncError:
            return SyncError(f"{doing}: {error}")

        def close(self) -> None:
            observed["closed"] = True

    class Updates:
        incoming = Incoming()

        class live:
            @staticmethod
            def put_back() -> None:
                observed["put back"] = True

    worker.__dict__["sync_updates"] = Updates()
    observed["failed"] = worker.sync_receive(3)
    try:
        worker.__dict__["execute_model"]()
    except RolloutError as error:
        observed["refusal"] = str(error)
    observed["left"] = _threads_after_a_failure()
    observed["products"] = _products_of_layers_packed_beside_others()
    observed["unpacked convolution"] = _round_trip_of_a_convolution(320)  # more elements than a digit of bfloat16
    observed["unpacked"] = [_round_trip(torch.Generator().manual_seed(1), *shape) for shape in SHAPES]
    return pickle.loads(pickle.dumps(observed))  # plain values only


def _threads_after_a_failure() -> tuple[str, int]:
    """(what was raised, threads more than before) where a module cannot be processed while others still arrive."""
    import threading
    from itertools import repeat
    from types import SimpleNamespace

    import torch

    from mcore_rl.rollout.vllm.receiver.worker_extension import _Plan, _Updates

    class Live:
        on_cpu, blocks = True, None
        start = num_bytes = staticmethod(lambda *_, **__: 0)
        write = staticmethod(lambda *_: torch.nn.Module())

        def process(self, _: object) -> None:
            raise RuntimeError("no primitive")

    region = SimpleNamespace(shape=(1,))
    part = SimpleNamespace(begin=0, num_bytes=4, dtype="float32", target="a", slot=None, target_slice=region)
    updates = object.__new__(_Updates)
    updates.plan, updates.adapters = object.__new__(_Plan), None
    updates.language_plan, updates._has_base = None, False
    updates.plan.messages = [SimpleNamespace(source_rank=0, num_bytes=4, parts=[part])] * 10_000  # type: ignore[list-item]
    updates.plan.rounds = []
    updates.live, updates.bucket_bytes = Live(), 8  # type: ignore[assignment]
    updates.incoming = SimpleNamespace(  # type: ignore[assignment]
        messages=lambda wanted, rounds: repeat(torch.zeros(4, dtype=torch.uint8), len(wanted))
    )
    before = threading.active_count()
    try:
        updates.receive()
    except RuntimeError as error:
        return str(error), threading.active_count() - before
    return "nothing", 0


def _round_trip(random: object, intermediate: int, hidden: int) -> bool:
    from types import SimpleNamespace

    import torch
    from vllm._custom_ops import cpu_prepack_moe_weight
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    from mcore_rl.rollout.vllm.receiver.packed_weights import unpacked_experts

    w13 = torch.randn(2, 2 * intermediate, hidden, generator=random)  # type: ignore[arg-type]
    w2 = torch.randn(2, hidden, intermediate, generator=random)  # type: ignore[arg-type]
    layer = torch.nn.Module()
    layer.w13_weight, layer.w2_weight = (torch.nn.Parameter(each.clone(), requires_grad=False) for each in (w13, w2))
    experts = object.__new__(CPUUnquantizedExperts)
    experts.moe_config = SimpleNamespace(intermediate_size_per_partition=intermediate, activation=None)
    experts._use_zentorch = False
    experts._pad_moe_intermediate(layer)

    packed = {
        name: cpu_prepack_moe_weight(getattr(layer, name).data, experts.isa) for name in ("w13_weight", "w2_weight")
    }
    moved = not torch.equal(packed["w2_weight"][..., :intermediate].flatten()[: w2.numel()], w2.flatten())
    same = all(
        torch.equal(unpacked_experts(packed[name][index], experts, name, whole[index].shape), whole[index])
        for name, whole in (("w13_weight", w13), ("w2_weight", w2))
        for index in range(2)
    )
    return moved and same


def _products_of_layers_packed_beside_others() -> list[bool]:
    """Whether each layer multiplies with its own weight, of one packed before and three in an update."""
    import torch
    from vllm import _custom_ops as ops

    from mcore_rl.rollout.vllm.receiver.receive_memory import beside

    torch.set_num_threads(2)
    weights = [torch.randn(192, 64) for _ in range(4)]
    packed = [ops.create_onednn_mm(weights[0].t(), 32)]
    ops.onednn_mm(packed[0], torch.eye(64), None)  # the product that vLLM keeps for the shape
    packed += [ops.create_onednn_mm(each.t(), 32) for each in beside(iter(weights[1:]), torch.Tensor.numel, most=1)]
    products = [ops.onednn_mm(handler, torch.eye(64), None).t() for handler in packed]
    return [torch.equal(product, weight) for product, weight in zip(products, weights, strict=True)]


def _round_trip_of_a_convolution(channels: int) -> bool | None:
    """None: this CPU packs none."""
    import torch

    if not torch.cpu._is_avx512_bf16_supported():
        return None
    from vllm._custom_ops import causal_conv1d_weight_pack

    from mcore_rl.rollout.vllm.receiver.packed_weights import unpacked_convolution

    weight = torch.randn(channels, 1, 4, generator=torch.Generator().manual_seed(2)).bfloat16()
    packed = causal_conv1d_weight_pack(weight.view(channels, 4))
    moved = not torch.equal(packed.flatten(), weight.flatten())
    return moved and torch.equal(unpacked_convolution(packed, weight.shape), weight)


@pytest.fixture(scope="module")
def outcomes(processes: None) -> dict[str, object]:
    with ProcessPoolExecutor(1, ENGINES) as pool:
        return pool.submit(_in_a_worker).result()


def test_methods_answer_and_never_raise(outcomes: dict[str, object]) -> None:
    with pytest.raises(SyncError, match="No channel is open: make a Publisher"):
        answer_of(outcomes["no channel"])  # type: ignore[arg-type]
    with pytest.raises(SyncError, match="receiving version 3: no route"):
        answer_of(outcomes["failed"])  # type: ignore[arg-type]


def test_after_a_failed_update_nothing_runs(outcomes: dict[str, object]) -> None:
    assert outcomes["put back"] and outcomes["closed"]
    refusal = "The weights are only partly updated: receiving version 3: no route. Complete an update before generating"
    assert outcomes["refusal"] == refusal


def test_what_fails_while_others_arrive_ends_their_arrival(outcomes: dict[str, object]) -> None:
    assert outcomes["left"] == ("no primitive", 0)


def test_a_layer_that_is_packed_beside_others_computes_with_its_own_elements(outcomes: dict[str, object]) -> None:
    """vLLM keeps one product per shape, which layers that are packed before, during and after an update all use."""
    assert outcomes["products"] == [True] * 4


def test_convolutions_are_unpacked_bit_for_bit(outcomes: dict[str, object]) -> None:
    if outcomes["unpacked convolution"] is None:
        pytest.skip(f"{KERNEL}vLLM packs convolutions for AVX-512 with bfloat16 alone")
    assert outcomes["unpacked convolution"]


def test_experts_are_unpacked_bit_for_bit(outcomes: dict[str, object]) -> None:
    assert outcomes["unpacked"] == [True] * len(SHAPES)
