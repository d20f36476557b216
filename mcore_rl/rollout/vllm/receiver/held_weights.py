"""An extension of vLLM's worker (``worker_extension_cls``) that holds its model against files and other models.

It needs no trainer and no channel; ``worker_extension`` receives a run's updates.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mcore_rl.checkpoints.convert import open_hf
from mcore_rl.checkpoints.rounded_weights import rounded_shard
from mcore_rl.config.rollout import Quantization, parse_rollout_layout
from mcore_rl.proofs.differences import Differences, piece_differences, region_differences, worst
from mcore_rl.proofs.effective_config import EffectiveConfig
from mcore_rl.rollout.vllm.effective_config import effective_config
from mcore_rl.rollout.vllm.engine import picture_models
from mcore_rl.rollout.vllm.receiver.live_weights import LiveWeights
from mcore_rl.rollout.vllm.receiver.multimodal_loader import MultimodalWorker
from mcore_rl.rollout.vllm.worker_methods import HeldWeightsMethods
from mcore_rl.weights.quantised import FP8, SCALES, QuantisedMatrix
from mcore_rl.weights.rollout_table import RolloutTable
from mcore_rl.weights.tensor_slice import TensorSlice
from mcore_rl.weights.views import view_of


class HeldWeights(MultimodalWorker):
    """Mixed into vLLM's worker class, which has ``rank``, ``vllm_config`` and ``model_runner``."""

    rank: int
    vllm_config: Any
    model_runner: Any

    @torch.no_grad()
    def held_differences(self, directory: str, layout: str, quantization: str = "none") -> Differences:
        """See ``HeldWeightsMethods.held_differences``."""
        pictures = self.vllm_config.model_config.architecture in picture_models.MODULES
        checkpoint, plain = open_hf(Path(directory), pictures=pictures)
        latent = bool(self.vllm_config.model_config.use_mla)
        table = RolloutTable(plain.family, plain.model, parse_rollout_layout(layout), latent_attention=latent)
        form = Quantization(quantization)
        live = LiveWeights(self.model_runner.get_model(), self.vllm_config, table, self.rank, form)
        differences = []
        in_fp8 = torch.empty(0)
        with checkpoint:
            for name, slot, parts in live.executed():
                plain_name = name.removesuffix(SCALES)
                stored = live.stored[live.names_of_heads.get(plain_name, plain_name)]
                pieces = [piece for place, piece in table.pieces(stored) if place == slot]
                if live.quantises(stored):
                    ((_, whole),) = parts
                    if not name.endswith(SCALES):
                        in_fp8 = whole.view(FP8)  # its scales come next
                        continue
                    rows, columns = in_fp8.shape
                    multiplied = QuantisedMatrix(form, (rows, columns)).dequantise(in_fp8, whole).cpu()
                    wanted = rounded_shard(checkpoint, table, stored, slot, form)
                    differences.append(region_differences(multiplied, wanted, pieces))
                    continue
                shape = table.shape(stored) if slot is None else table.shape(stored)[1:]
                held: torch.Tensor | None = None
                for start, values in parts:
                    held = torch.zeros(shape, dtype=values.dtype) if held is None else held
                    view_of(held, TensorSlice(start, tuple(values.shape))).copy_(values)
                assert held is not None, f"{name} has no parts"
                differences.append(piece_differences(held, pieces, checkpoint))
        return worst(differences)

    def held_config(self) -> EffectiveConfig:
        """See ``HeldWeightsMethods.held_config``."""
        return effective_config(self.model_runner.get_model())


if TYPE_CHECKING:
    _METHODS: type[HeldWeightsMethods] = HeldWeights
