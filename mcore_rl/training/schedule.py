"""Runs a list of microbatches through Megatron's pipeline schedule: one stage, 1F1B, or interleaved.

Knows nothing of losses: the last stage hands every output to ``on_output``, and the schedule's backward pass
differentiates the returned value unscaled (``calculate_per_token_loss`` in the model's configuration).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from mcore_rl.parallel.phase import phase
from mcore_rl.training.microbatch import Microbatch

OnOutput = Callable[[Microbatch, Tensor], Tensor]
BeforeForward = Callable[[Microbatch], None]


def run_schedule(
    chunks: Sequence[torch.nn.Module],
    microbatches: Sequence[Microbatch],
    before_forward: BeforeForward,
    on_output: OnOutput,
    *,
    forward_only: bool,
) -> None:
    """Run the forward pass, and unless ``forward_only`` the backward pass, of every microbatch.

    before_forward: called on every stage before a microbatch enters a chunk.  on_output: called on the last stage
    with the model's output [B, N/B, columns]; returns the scalar to differentiate (any scalar when ``forward_only``).
    """
    unscaled = torch.zeros((), dtype=torch.int, device=microbatches[0].tokens.device)

    def finish(microbatch: Microbatch, output: Tensor) -> tuple[Tensor, Tensor, None]:
        with phase("loss", microbatch=microbatch.index):
            return on_output(microbatch, output), unscaled, None

    def forward_step(
        iterator: Iterator[Microbatch], chunk: torch.nn.Module
    ) -> tuple[Tensor, Callable[[Tensor], object]]:
        microbatch = next(iterator)
        before_forward(microbatch)
        with phase("forward", microbatch=microbatch.index):
            output = chunk(
                input_ids=microbatch.tokens,
                position_ids=microbatch.position_ids,
                attention_mask=None,
                packed_seq_params=microbatch.packed,
            )
        return output, partial(finish, microbatch)

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(microbatches) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(microbatches),
        seq_length=microbatches[0].width,  # with several stages, all microbatches have the shape of the first
        micro_batch_size=microbatches[0].tokens.shape[0],
        forward_only=forward_only,
    )
