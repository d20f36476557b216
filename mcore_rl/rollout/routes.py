"""The experts that engines report of samples: joined where a sample was continued, and checked before the training.

A wrong expert would not stop a run: it would train other weights than the sample was drawn with.
"""

from __future__ import annotations

import numpy as np

from mcore_rl.config.model import ModelConfig
from mcore_rl.ground.arrays import RoutesArray
from mcore_rl.ground.errors import RolloutError
from mcore_rl.rollout.protocol import Request, Sample

REMEDY = "Write actor.router_replay=r2, which records the trainer's own, or off"


def continued(request: Request, reported: RoutesArray | None) -> RoutesArray | None:
    """``Sample.experts`` of an answer to ``request``.  reported: of all tokens that the engine read; None: nothing.

    The engine read the tokens of ``so_far`` again, maybe with other weights: each keeps the experts that it was drawn
    with, also where the answer was aborted before its first token, of which engines report nothing.
    """
    before = None if request.so_far is None else request.so_far.experts
    if reported is None or before is None:
        return before if reported is None else reported
    return np.concatenate([before, reported[len(before) :]])


def checked_routes(sample: Sample, num_prompt_tokens: int, model: ModelConfig) -> RoutesArray:
    """``sample.experts`` in the dtype of ``MoeConfig.choice_bytes``, [prompt + N - 1, L, K].

    Rows of dense layers are not looked at.  Raises RolloutError, which names the sample: experts that are missing, of
    another shape, out of range, or twice the same for a token.
    """
    assert model.moe is not None, "a dense model has no routers"
    who = f"prompt {sample.prompt_id}, sample {sample.index}"
    routes = sample.experts
    moe = model.moe
    if routes is None:
        raise RolloutError(f"{who}: the engine reported no experts. {REMEDY}")
    shape = (num_prompt_tokens + len(sample.tokens) - 1, model.num_layers, moe.top_k)
    if routes.shape != shape or not np.issubdtype(routes.dtype, np.integer):
        raise RolloutError(
            f"{who}: the engine reported experts as {routes.dtype} {list(routes.shape)}, and {shape[0]} tokens that it "
            f"read, {shape[1]} layers and {shape[2]} experts of each token make integers {list(shape)}. {REMEDY}"
        )
    for layer in range(model.num_layers):
        if layer not in moe.dense_layers:
            _demand_layer(routes[:, layer], layer, moe.num_experts, who)
    return routes.astype(np.uint8 if moe.choice_bytes == 1 else np.int16, copy=False)


def _demand_layer(choices_NK: RoutesArray, layer: int, num_experts: int, who: str) -> None:
    """Raises RolloutError where a token of one layer has an expert that is not there, or one twice."""
    columns_KN = np.ascontiguousarray(choices_NK.T)  # whole columns compare ten times as fast as rows of a few bytes
    outside_N = ((columns_KN < 0) | (columns_KN >= num_experts)).any(0)
    twice_N = np.zeros(len(choices_NK), dtype=bool)
    for one in range(1, len(columns_KN)):
        for other in range(one):
            twice_N |= columns_KN[one] == columns_KN[other]
    for wrong_N, problem in ((outside_N, f"and there are {num_experts}, from 0"), (twice_N, "one of them twice")):
        if wrong_N.any():
            token = int(wrong_N.argmax())
            raise RolloutError(
                f"{who}: token {token} went to the experts {choices_NK[token].tolist()} of layer {layer}, {problem}, "
                f"says the engine. {REMEDY}"
            )
