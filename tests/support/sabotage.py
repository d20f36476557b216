"""Deliberate mistakes of the kind that users of this field have met, to see that the gate sees each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.moe.moe_layer import MoELayer

from mcore_rl.ground.types import LossInputs
from mcore_rl.training.engine import Engine
from mcore_rl.training.latent_attention import ReplicatedLinear
from mcore_rl.training.microbatch import Microbatch
from mcore_rl.training.router import RoutedMicrobatch
from mcore_rl.training.sequences import PackedSequences, row_positions


def _unsummed_norms(engine: Engine) -> None:
    """Norm gradients of sequence-parallel ranks are not summed."""
    for parameter in engine.models[0].parameters():
        parameter.sequence_parallel = False  # type: ignore[attr-defined]


def _unsummed_replicas(engine: Engine) -> None:
    """Gradients of projections that every tensor rank holds whole are not summed."""
    for module in engine.models[0].modules():
        if isinstance(module, ReplicatedLinear):
            module.weight.sequence_parallel = False  # type: ignore[assignment]


def _unsummed_key_heads(engine: Engine) -> None:
    """Gradients of a key/value head that several tensor ranks take are those of the first of them alone."""
    for module in engine.models[0].modules():
        if isinstance(module, SelfAttention) and dist.get_rank() == 1:
            project = module.get_query_key_value_tensors

            def alone(*args: object, project: Callable = project, **kwargs: object) -> tuple[torch.Tensor, ...]:
                query, key, value = project(*args, **kwargs)
                return query, key.detach(), value.detach()

            module.get_query_key_value_tensors = alone  # type: ignore[method-assign]


def _averaged_over_data_ranks(engine: Engine) -> None:
    """Gradients are averaged over data-parallel ranks, though the loss is divided by the global count already."""
    for chunk in engine.chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):  # type: ignore[union-attr, misc]
            for bucket in group.buckets:
                bucket.gradient_scaling_factor = 1.0 / engine.groups.dp_cp.size()


def _mean_of_microbatches(engine: Engine) -> None:
    """Each microbatch's loss is a mean over its own tokens."""
    make = engine._loss_inputs

    def rescaled(*args: object, **kwargs: object) -> LossInputs:
        inputs = make(*args, **kwargs)  # type: ignore[arg-type]
        scale = 16.0 / inputs.mask_N.sum().clamp(min=1)
        assert inputs.logprobs_N is not None
        inputs.logprobs_N.register_hook(lambda grad: grad * scale)
        return inputs

    engine._loss_inputs = rescaled  # type: ignore[method-assign]


def _parts_of_responses(engine: Engine) -> None:
    """A context rank takes the part that it has of a response for the whole."""
    make = engine._loss_inputs

    def parted(*args: object, **kwargs: object) -> LossInputs:
        return replace(make(*args, **kwargs), sum_over_context=lambda x: x)  # type: ignore[arg-type]

    engine._loss_inputs = parted  # type: ignore[method-assign]


def _experts_reduced_as_dense(engine: Engine) -> None:
    """Gradients of replicated experts are not summed over the ranks that hold them."""
    for chunk in engine.chunks:
        for group in chunk.expert_parallel_bucket_groups:  # type: ignore[union-attr]
            group.start_grad_sync = lambda *args, **kwargs: None
            group.finish_grad_sync = lambda *args, **kwargs: None


def _attention_across_borders(engine: Engine) -> None:
    """Packed sequences see their neighbours."""
    for module in engine.models[0].modules():
        if type(module).__name__ == "PackedAttention":
            forward = module.forward

            def leak(query: torch.Tensor, *args: object, forward: Callable = forward, **kwargs: object) -> torch.Tensor:
                output = forward(query, *args, **kwargs)
                return output + 1e-3 * output.roll(1, dims=0)

            module.forward = leak  # type: ignore[method-assign]


def _answers_see_answers(engine: Engine) -> None:
    """Values of an answer have a thousandth of the answer before it to the same prompt."""
    for module in engine.models[0].modules():
        if type(module).__name__ == "PackedAttention":
            forward = module.forward

            def leak(
                query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: object,
                packed_seq_params: PackedSequences, forward: Callable = forward, **kwargs: object,
            ) -> torch.Tensor:  # fmt: skip
                runs, trunks = (
                    list(torch.split(value, list(packed_seq_params.padded_lengths))),
                    packed_seq_params.trunks,
                )
                for number in range(1, len(trunks)):
                    if trunks[number] is not None and trunks[number] == trunks[number - 1]:
                        runs[number] = runs[number] + 1e-3 * runs[number - 1].mean(0)
                value = torch.cat(runs)
                return forward(query, key, value, *args, packed_seq_params=packed_seq_params, **kwargs)

            module.forward = leak  # type: ignore[method-assign]


def _answers_begin_at_0(engine: Engine) -> None:
    """Positions of an answer do not go on where those of its prompt end."""

    def spoil(microbatch: Microbatch) -> Microbatch:
        packed = microbatch.packed
        assert packed is not None and packed.segments
        packed.__dict__["first_positions"] = (0,) * len(packed.lengths)
        return microbatch

    _spoil_microbatches(engine, spoil)


def _prompts_counted_once(engine: Engine) -> None:
    """Routers count a token of a shared prompt once, and not once for each of its samples."""

    def spoil(microbatch: Microbatch) -> Microbatch:
        shared = microbatch.shared
        if shared is None:
            return microbatch
        return replace(microbatch, shared=replace(shared, counts_N=shared.counts_N.clamp(max=1)))

    _spoil_microbatches(engine, spoil)


def _spoil_microbatches(engine: Engine, spoil: Callable[[Microbatch], Microbatch]) -> None:
    build = engine._microbatches
    engine._microbatches = lambda batch: list(map(spoil, build(batch)))  # type: ignore[method-assign]


def _shifted_expert(engine: Engine) -> None:
    """Experts of a rank are stored in another order than the router believes."""
    for module in engine.models[0].modules():
        if isinstance(module, MoELayer) and dist.get_rank() == 1:
            experts = list(module.experts.local_experts)
            first, second = experts[0].linear_fc1.weight, experts[1].linear_fc1.weight
            with torch.no_grad():
                kept = first.clone()
                first.copy_(second)
                second.copy_(kept)


def _replayed_a_row_late(engine: Engine) -> None:
    """A tensor rank's routers repeat the experts of the tokens before."""
    assert engine.routing is not None
    replay = engine.routing._replay

    def late(sources_M: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return tuple(None if each is None else each.roll(dist.get_rank(), dims=0) for each in replay(sources_M))

    engine.routing._replay = late  # type: ignore[method-assign, assignment]


def _recomputed_freely(engine: Engine) -> None:
    """The recomputation of a layer chooses its experts itself."""
    assert engine.routing is not None
    for router in engine.routing.routers:
        current = router._current_microbatch

        def freely(recomputing: bool, current: Callable = current) -> RoutedMicrobatch:
            microbatch: RoutedMicrobatch = current(recomputing)
            return replace(microbatch, replay_MLK=None, free_M=None) if recomputing else microbatch

        router._current_microbatch = freely  # type: ignore[method-assign]


def _orthogonal_parts(engine: Engine) -> None:
    """Each tensor rank makes its part of a matrix orthogonal, as Megatron's Muon does by default."""
    assert engine.optimizer is not None and engine.optimizer._muon is not None
    for _, matrices in engine.optimizer._muon._parts:
        matrices[:] = [replace(matrix, dim=None) for matrix in matrices]


def _unsummed_towers(engine: Engine) -> None:
    """Gradients of a tower, of whose pictures each tensor rank has a part, are not summed."""
    for name, parameter in engine.models[0].named_parameters():
        if name.startswith("vision."):
            parameter.sequence_parallel = False  # type: ignore[attr-defined]


def _features_of_neighbours(engine: Engine) -> None:
    """Each token of a picture gets the feature of the token behind it, where there is one."""

    def spoil(microbatch: Microbatch) -> Microbatch:
        if microbatch.feature_N is None:
            return microbatch
        has_N = microbatch.feature_N >= 0
        last = sum(each.tokens for each in microbatch.pictures) - 1
        return replace(microbatch, feature_N=torch.where(has_N, microbatch.feature_N + 1, -1).clamp(max=last))

    _spoil_microbatches(engine, spoil)


def _positions_of_text(engine: Engine) -> None:
    """Tokens of pictures are numbered as text is, along one axis."""

    def spoil(microbatch: Microbatch) -> Microbatch:
        packed = microbatch.packed
        assert packed is not None and packed.positions_3N is not None
        rows = row_positions(packed.padded_lengths, packed.cp, packed.cp_rank, packed.device)
        packed.positions_3N = rows.expand(3, -1).to(packed.positions_3N.dtype)
        return microbatch

    _spoil_microbatches(engine, spoil)


SABOTAGE: dict[str, Callable[[Engine], None]] = {
    "unsummed_norms": _unsummed_norms,
    "unsummed_replicas": _unsummed_replicas,
    "unsummed_key_heads": _unsummed_key_heads,
    "averaged_over_data_ranks": _averaged_over_data_ranks,
    "mean_of_microbatches": _mean_of_microbatches,
    "parts_of_responses": _parts_of_responses,
    "experts_reduced_as_dense": _experts_reduced_as_dense,
    "attention_across_borders": _attention_across_borders,
    "answers_see_answers": _answers_see_answers,
    "answers_begin_at_0": _answers_begin_at_0,
    "prompts_counted_once": _prompts_counted_once,
    "shifted_expert": _shifted_expert,
    "replayed_a_row_late": _replayed_a_row_late,
    "recomputed_freely": _recomputed_freely,
    "orthogonal_parts": _orthogonal_parts,
    "unsummed_towers": _unsummed_towers,
    "features_of_neighbours": _features_of_neighbours,
    "positions_of_text": _positions_of_text,
}
