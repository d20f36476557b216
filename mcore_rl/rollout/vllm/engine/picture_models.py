"""vLLM's models that see pictures, made to take patches (``data/media/pixels.py``) without a processor.

vLLM 0.32 makes a Hugging Face processor at every start, to ask it how large a picture may be.  It needs the files of a
tokenizer and of a processor, and torchvision, for videos.  Here pictures come processed, and the models answer that
question themselves.

They also normalise pixels by the numbers of the family's tower (``VisionConfig``), which nothing overwrites: vLLM's own
are read from the processor's file, are absent without it, and are random in an engine that starts on random weights
(model_loader/dummy_loader.py).

Language models that vLLM has in one file with a tower (Qwen3.5) are here for torchvision's sake alone.

vLLM's registry asks for a class by the name that ``install`` gives it.  Each process of an engine calls that before it
resolves a model: the engine's own, the core (by the class of its executor), workers (by their extension).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fusion.mm_input_norm import FusedMMInputNorm
from vllm.model_executor.models.registry import ModelRegistry
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.processing import BaseDummyInputsBuilder, BaseMultiModalProcessor, BaseProcessingInfo
from vllm.v1.executor import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from mcore_rl.config.model import VisionConfig
from mcore_rl.families.config_json import read_config
from mcore_rl.families.registry import model_of
from mcore_rl.families.text_part import text_config
from mcore_rl.rollout.vllm import torchvision_names
from mcore_rl.rollout.vllm.engine.environment import picture_folder
from mcore_rl.rollout.vllm.engine.patch_files import NAME_BYTES, patches_of_names
from mcore_rl.rollout.vllm.torchvision_names import BESIDE_A_TOWER

RESCALE = 1 / 255
# Architecture, which is the name of vLLM's class, too -> vLLM's module of it.
MODULES = {
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe",
}


class SpawnedExecutor(MultiprocExecutor):  # type: ignore[misc]  # untyped
    """vLLM's executor; a core that is spawned learns of the models here when it unpickles this class."""


def executor_of(settings: Any) -> type[Executor]:
    """vLLM's class of executors for ``settings``, a ``VllmConfig``."""
    executor: type[Executor] = Executor.get_class(settings)
    return SpawnedExecutor if executor is MultiprocExecutor else executor


def install() -> None:
    """Tells vLLM's registry of the models, in this process; none is imported before it is asked for."""
    for architecture in (*MODULES, *BESIDE_A_TOWER):
        ModelRegistry.register_model(architecture, f"{__name__}:{architecture}")


def use(directory: Path, *, pictures: bool) -> None:
    """Imports a model from here in this process: else vLLM would start one to look at it, for seconds.

    pictures: of a multimodal checkpoint the whole; else its language model.
    """
    config = read_config(directory)
    for architecture in (config if pictures else text_config(config))["architectures"]:
        if architecture in MODULES or architecture in BESIDE_A_TOWER:
            ModelRegistry.register_model(architecture, _model(architecture))


def _model(architecture: str) -> type:
    return seeing(architecture) if architecture in MODULES else _theirs(architecture)


def _theirs(architecture: str) -> Any:
    """vLLM's own class of ``architecture``."""
    torchvision_names.stand_in()
    name = (MODULES | BESIDE_A_TOWER)[architecture]
    return getattr(importlib.import_module(f"vllm.model_executor.models.{name}"), architecture)


def __getattr__(name: str) -> Any:
    """The model of an architecture, which vLLM's registry looks up here."""
    if name in MODULES or name in BESIDE_A_TOWER:
        return _model(name)
    raise AttributeError(name)


class PatchesInfo(BaseProcessingInfo):  # type: ignore[misc]  # untyped
    """What vLLM asks of the pictures of a model: there may be any number, each as long as a prompt."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """Takes pictures, and no videos."""
        return {"image": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        """The room of a whole sequence for one picture, to which vLLM's cache of features is made as large."""
        return {"image": seq_len}


class _NoDummies(BaseDummyInputsBuilder[PatchesInfo]):  # type: ignore[misc]  # untyped
    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return ""

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> dict[str, Any]:
        return {}


class _NoProcessor(BaseMultiModalProcessor[PatchesInfo]):  # type: ignore[misc]  # untyped
    """Processes nothing: requests bring patches (``engine_input``)."""

    requires_tokenizer = False

    def get_dummy_mm_inputs(self, *_: object, **__: object) -> Any:
        """Returns nothing: vLLM would warm its processor up with it."""
        return None

    def _get_mm_fields_config(self, *_: object) -> Any:
        raise NotImplementedError

    def _get_prompt_updates(self, *_: object) -> Any:
        raise NotImplementedError


@cache
def seeing(architecture: str) -> type:
    """vLLM's class of ``architecture``, with the numbers of its tower and without a processor."""
    theirs: Any = _theirs(architecture)

    class Seeing(theirs):  # type: ignore[misc]  # untyped
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            _, model = model_of(read_config(Path(vllm_config.model_config.model)), pictures=True)
            assert model.vision is not None, "model_of refuses a model without a tower"
            self.visual.input_norm = input_norm(model.vision)

        def _parse_and_validate_image_input(self, **kwargs: Any) -> Any:
            pixels = kwargs.get("pixel_values")
            if pixels is not None and pixels.shape[-1] == NAME_BYTES:
                kwargs["pixel_values"] = patches_of_names(picture_folder(), pixels, kwargs["image_grid_thw"])
            return super()._parse_and_validate_image_input(**kwargs)

    Seeing.__name__ = Seeing.__qualname__ = architecture
    registered = MULTIMODAL_REGISTRY.register_processor(_NoProcessor, info=PatchesInfo, dummy_inputs=_NoDummies)
    made: type = registered(Seeing)
    return made


def input_norm(vision: VisionConfig) -> Any:
    """vLLM's normalisation of pixels by the numbers of a tower, in buffers that are not weights."""
    norm = FusedMMInputNorm(vision.pixel_mean, vision.pixel_std, RESCALE)
    for name in ("weight", "bias"):
        norm.register_buffer(name, getattr(norm, name), persistent=False)
    return norm


def pixel_numbers(vision: VisionConfig) -> dict[str, Tensor]:
    """What these buffers hold: [3] each, by which a byte is multiplied, and what is added to the product."""
    mean = torch.tensor(vision.pixel_mean)
    std = torch.tensor(vision.pixel_std)
    return {"weight": RESCALE / std, "bias": -mean / std}


install()
