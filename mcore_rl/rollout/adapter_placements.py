"""Where vLLM's own loading of adapters puts every element on a rank: an oracle that shares nothing with our tables.

It runs in the process of ``rollout/parameters.py``, which builds vLLM's model; vLLM's manager of adapters gives its
layers their memory, and fills it as for a directory that PEFT saved (vllm/lora/model_manager.py, 0.32).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mcore_rl.proofs.placement import Stored

ADAPTER = 1
HELD_RANK = 8


def placed_adapters(
    model: nn.Module, config: Any, tensors: Mapping[str, Tensor], modules: Sequence[str]
) -> dict[str, Stored]:
    """The elements of every A and B, by vLLM's layer, ``lora_A`` or ``lora_B``, and the linear's place in the layer.

    modules: the ends of the names of the layers that have adapters.
    tensors: of a PEFT directory whose scale is 1, float64 integers from 1, all of one rank.
    """
    from vllm.config import LoRAConfig, set_current_vllm_config
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.model_manager import LRUCacheLoRAModelManager, create_lora_manager
    from vllm.lora.peft_helper import PEFTHelper

    rank = next(len(tensor) for name, tensor in tensors.items() if ".lora_A." in name)
    config.lora_config = LoRAConfig(
        max_lora_rank=HELD_RANK, max_loras=1, lora_dtype=torch.float64, target_modules=list(modules)
    )
    with set_current_vllm_config(config):
        manager = create_lora_manager(
            model, max_num_seqs=1, max_num_batched_tokens=8, vocab_size=config.model_config.get_vocab_size(),
            lora_config=config.lora_config, vllm_config=config, device=torch.device("cpu"),
            lora_manager_cls=LRUCacheLoRAModelManager,
        )  # fmt: skip
        mapper = manager.model.hf_to_vllm_mapper if hasattr(manager.model, "hf_to_vllm_mapper") else None
        peft = PEFTHelper.from_dict({"r": rank, "lora_alpha": rank, "target_modules": "all-linear"})
        adapter = LoRAModel.from_lora_tensors(
            ADAPTER, dict(tensors), peft, device="cpu", dtype=torch.float64,
            model_vocab_size=config.model_config.get_vocab_size(),
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )  # fmt: skip
        manager.add_adapter(adapter)
        manager.activate_adapter(ADAPTER)
    slot, placed = manager.lora_index_to_id.index(ADAPTER), {}
    for name, layer in manager.modules.items():
        for source, (a, b) in enumerate(zip(layer.lora_a_stacked, layer.lora_b_stacked, strict=True)):
            for which, held in (("lora_A", a[slot, 0, :rank]), ("lora_B", b[slot, 0, :, :rank])):
                placed[f"{name}.{which}.{source}"] = Stored(
                    held.long().numpy(), {"dtype": None}
                )  # of the model's by default
    return placed
