"""vLLM's loader of the text part of a multimodal checkpoint, for engines that no trainer sends weights to.

vLLM runs the language model by itself (``engine/environment.py``), and the files have its tensors under longer names,
beside a tower.  They are read as a trainer reads them.  A worker imports this module before it loads its model.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import torch
from vllm.config import ModelConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from mcore_rl.checkpoints.convert import open_hf
from mcore_rl.rollout.engine.environment import TEXT_PART_FORMAT


@register_model_loader(TEXT_PART_FORMAT)
class TextPartLoader(DefaultModelLoader):  # type: ignore[misc]  # untyped
    """Reads the text model's tensors, one after another, as plain numbers."""

    def get_all_weights(
        self, model_config: ModelConfig, model: torch.nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """(name, tensor) of every tensor of the text model."""
        checkpoint, table = open_hf(Path(model_config.model))
        with checkpoint:
            for name in table.hf_tensors:
                if name in checkpoint.tensors:
                    yield name, checkpoint.read(name)


class TextPartWorker:
    """An extension of vLLM's worker that adds nothing but this module."""
