"""vLLM's loader of a multimodal checkpoint, for engines that no trainer sends weights to: its text part, or the whole.

vLLM runs a text part by itself (``engine/environment.py``), and the files have its tensors under longer names, beside a
tower.  Of the whole, vLLM's own loader would misread experts that are stored as transformers 5 stores them, where they
are square.  So tensors are read as a trainer reads them, one expert after another and as plain numbers.  A worker
imports this module before it loads its model.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import torch
from vllm.config import ModelConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from mcore_rl.checkpoints.convert import open_hf
from mcore_rl.checkpoints.rest import part_in
from mcore_rl.rollout.vllm.engine.environment import MULTIMODAL_FORMAT
from mcore_rl.rollout.vllm.engine.picture_models import MODULES


@register_model_loader(MULTIMODAL_FORMAT)
class MultimodalLoader(DefaultModelLoader):  # type: ignore[misc]  # untyped
    """Reads the tensors of the model that vLLM runs, one after another, as plain numbers."""

    def get_all_weights(
        self, model_config: ModelConfig, model: torch.nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """(name, tensor) of every tensor, by the name that vLLM's model knows."""
        directory = Path(model_config.model)
        pictures = model_config.architecture in MODULES
        checkpoint, table = open_hf(directory, pictures=pictures)
        part = part_in(directory)
        assert part is not None, "the checkpoint is multimodal"
        with checkpoint:
            for name in table.hf_tensors:
                if name in checkpoint.tensors:
                    yield part.spellings[0].in_files(name) if pictures else name, checkpoint.read(name)


class MultimodalWorker:
    """An extension of vLLM's worker that adds nothing but this module, and with it the models that see pictures."""
