"""Where the samples of a prompt can be packed with it once, and why not elsewhere.

It is exact where a token reads others by attention alone, of a kind that takes branches: then a trunk's hidden states
are those of every sequence that begins with it.
"""

from __future__ import annotations

from mcore_rl.config.engine import EngineConfig, SharePrompts
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.parallel import ParallelConfig


def why_not_shared(
    engine: EngineConfig, model: ModelConfig, parallel: ParallelConfig, *, transformer_engine: bool
) -> str | None:
    """Why an engine computes the prompt of several samples once for each; None: once for all.

    transformer_engine: whether its layers are used.
    """
    reasons = {
        "share_prompts=off": engine.share_prompts is SharePrompts.off,
        "microbatches are not packed (microbatch_sequences)": engine.microbatch_tokens is None,
        f"parallel.cp={parallel.cp} cuts each sequence": parallel.cp > 1,
        "Transformer Engine's attention takes whole sequences; layer_spec=local takes branches": transformer_engine,
        "layers of linear attention carry a state from token to token": model.linear_attention is not None,
        "the model sees pictures, which stand in prompts": model.vision is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
