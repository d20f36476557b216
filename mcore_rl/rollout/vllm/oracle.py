"""The parameters that vLLM stores on any rank of any rollout layout, without an engine, peers or GPUs.

``VllmProcess`` builds vLLM's own model classes in a process of its own, as one rank after the other.
``rollout_parameters`` returns names, shapes and dtypes, even at full model size in seconds, because the tensors are on
the meta device.  ``load_directly`` makes vLLM load a (small) Hugging Face directory by its own ``load_weights``.  Both
return the parameters as they are loaded and updated, before ``process_weights_after_loading`` packs them for a kernel.
Together they are an independent reference for the reshard plan, which shares no code with them.

It runs no forward pass, and does not cover what only certain GPU kernels do: FlashInfer's TRT-LLM and AITER's experts
round their intermediate size up before they are allocated (vllm/model_executor/layers/fused_moe/oracle/unquantized.py,
0.32), and AITER may fuse shared experts into the routed ones.

Invariant: vLLM resets seeds and threads, and keeps the ranks of its process in module globals; so it is imported in the
other process only.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.overrides import TorchFunctionMode

from mcore_rl.config.rollout import RolloutLayout
from mcore_rl.families.config_json import CONFIG, read_config
from mcore_rl.families.text_part import text_part_of
from mcore_rl.ground.errors import RolloutError
from mcore_rl.proofs.effective_config import EffectiveConfig
from mcore_rl.proofs.placement import NOTHING, Stored
from mcore_rl.proofs.tracer import NumberedCheckpoint
from mcore_rl.rollout.vllm import torchvision_names

T = TypeVar("T")
ADAPTER = 1
HELD_RANK = 8  # of an adapter


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of a rank.

    dtype: its name in torch.  experts: the model's experts that dimension 0 holds, in order; empty if dimension 0 is
    not over experts.
    """

    shape: tuple[int, ...]
    dtype: str
    experts: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class VllmLayout:
    """The layout as vLLM's arguments; global rank = data-parallel rank * tp + tensor-parallel rank.

    latent_attention: whether MLA runs as such.  ranks: the global ranks to build.
    """

    tp: int
    dp: int
    expert_parallel: bool
    latent_attention: bool
    ranks: tuple[int, ...]


class VllmProcess:
    """A process in which vLLM builds models; a context manager.  The first call also imports vLLM, 5 to 8 s.

    Arguments of both methods:
    tp: ``tensor_parallel_size``.
    dp: ``data_parallel_size``.
    expert_parallel: ``enable_expert_parallel``: whole experts over all tp * dp ranks, instead of a slice of each
    expert.
    ranks: the ranks to build, of tp * dp (data-parallel rank * tp + tensor-parallel rank); None: all.
    latent_attention: MLA runs as such, as in vLLM unless VLLM_MLA_DISABLE is set; other models ignore it.

    Raises ``RolloutError`` if vLLM refuses: an unknown architecture, a tp that does not divide the heads, tensors that
    are missing or misshapen, no vLLM.
    """

    def __enter__(self) -> Self:
        # Spawned: vLLM must not find this process's process groups, Megatron or patches of torch.
        context = multiprocessing.get_context("spawn")
        self._process = ProcessPoolExecutor(max_workers=1, mp_context=context, initializer=_be_quiet)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.shutdown()

    def rollout_parameters(
        self,
        hf_config: Path | Mapping[str, Any],
        *,
        tp: int = 1,
        dp: int = 1,
        expert_parallel: bool = False,
        ranks: Sequence[int] | None = None,
        latent_attention: bool = True,
        dtype: str = "bfloat16",
    ) -> list[dict[str, Parameter]]:
        """Every parameter of each of ``ranks``, by vLLM's name; a tied output layer is the embedding and has no entry.

        hf_config: a Hugging Face directory, of which only config.json is read, or the content of that file.
        dtype: of the model, as in vLLM's ``ModelConfig.dtype``.
        """
        layout = _layout(tp, dp, expert_parallel, ranks, latent_attention)
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) if isinstance(hf_config, Mapping) else hf_config
            if isinstance(hf_config, Mapping):
                (source / CONFIG).write_text(json.dumps(dict(hf_config)))
            return self._run(_describe, source, layout, dtype)

    def effective_config(
        self, hf_dir: Path, *, latent_attention: bool = True, dtype: str = "bfloat16"
    ) -> EffectiveConfig:
        """The configuration that vLLM's modules compute with in ``dtype``, given ``hf_dir``."""
        (config,) = self._run(_configured, hf_dir, _layout(1, 1, False, None, latent_attention), dtype)
        return config

    def load_directly(
        self,
        hf_dir: Path,
        *,
        tp: int = 1,
        dp: int = 1,
        expert_parallel: bool = False,
        ranks: Sequence[int] | None = None,
        latent_attention: bool = True,
    ) -> list[dict[str, NDArray[np.float32]]]:
        """The parameters of each of ``ranks`` after vLLM loaded ``hf_dir``, float32 (integers to 2**24 are exact)."""
        layout = _layout(tp, dp, expert_parallel, ranks, latent_attention)
        return self._run(_load, hf_dir, layout, "float32")

    def placements(
        self,
        hf_config: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        layout: RolloutLayout,
        latent_attention: bool = True,
    ) -> dict[int, dict[str, Stored]]:
        """Where vLLM's ``load_weights`` puts each element of a checkpoint, on each rank of an engine of ``layout``.

        hf_config: the content of config.json, of a small model.  shapes: of the checkpoint's tensors; their elements
        are numbered as ``NumberedCheckpoint`` numbers them, and are exact to 2**53.  Names are the tables'; vLLM gets
        those of the files of a multimodal model.
        """
        part = text_part_of(hf_config)
        if part is not None:
            shapes = {part.spellings[0].in_files(name): shape for name, shape in shapes.items()}
        ranks = _layout(layout.tp, layout.engine_dp, layout.ep > 1, None, latent_attention)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / CONFIG).write_text(json.dumps(dict(hf_config)))
            return dict(enumerate(self._run(partial(_place, dict(shapes)), Path(folder), ranks, "bfloat16")))

    def adapter_placements(
        self,
        hf_config: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        layout: RolloutLayout,
        modules: tuple[str, ...],
    ) -> dict[int, dict[str, Stored]]:
        """``placements`` of adapters in layers whose names end in ``modules``.  shapes: by PEFT's names."""
        ranks = _layout(layout.tp, layout.engine_dp, layout.ep > 1, None, latent_attention=True)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / CONFIG).write_text(json.dumps(dict(hf_config)))
            return dict(enumerate(self._run(partial(_adapt, dict(shapes), modules), Path(folder), ranks, "float32")))

    def _run(
        self, of_rank: Callable[[int, VllmLayout, Path, str], T], source: Path, layout: VllmLayout, dtype: str
    ) -> list[T]:
        read_config(source)  # raises a clear error if it cannot be read
        try:
            result = self._process.submit(_on_each_rank, of_rank, source, layout, dtype).result()
        except BrokenProcessPool as error:
            raise RolloutError(f"{source}: the process that vLLM ran in died: out of memory, or killed.") from error
        if isinstance(result, str):
            raise RolloutError(f"vLLM refuses {source} at tp={layout.tp}, dp={layout.dp}: {result}")
        return result


def _layout(tp: int, dp: int, expert_parallel: bool, ranks: Sequence[int] | None, latent_attention: bool) -> VllmLayout:
    wanted = tuple(range(tp * dp) if ranks is None else ranks)
    assert all(0 <= rank < tp * dp for rank in wanted), f"ranks {wanted} of tp={tp}, dp={dp}"
    return VllmLayout(tp=tp, dp=dp, expert_parallel=expert_parallel, latent_attention=latent_attention, ranks=wanted)


# Everything below runs in the other process.


def _be_quiet() -> None:
    logging.disable(logging.ERROR)  # vLLM's messages about an engine, which is never started here


class _Peers:
    """Stands in for a ProcessGroup while models are built, which only ask for its rank and size."""

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        self.ranks = list(ranks)
        self.index = list(ranks).index(rank)

    def rank(self) -> int:
        return self.index

    def size(self) -> int:
        return len(self.ranks)


@contextmanager
def standing_as(rank: int, layout: VllmLayout) -> Iterator[None]:
    """While active, vLLM's groups are those that ``initialize_model_parallel`` would make on ``rank``, without peers.

    vllm/distributed/parallel_state.py, 0.32: all ranks are laid out as data parallel x tensor parallel, and expert
    parallelism spans both.  Building and loading a model only reads sizes and ranks of groups.
    """
    from vllm import envs
    from vllm.distributed import parallel_state

    def group(ranks: Sequence[int]) -> Any:
        coordinator = object.__new__(parallel_state.GroupCoordinator)  # its own __init__ would wait for the peers
        coordinator.rank = rank
        coordinator.ranks = list(ranks)
        coordinator.world_size = len(ranks)
        coordinator.rank_in_group = coordinator.ranks.index(rank)
        coordinator.device_group = coordinator.cpu_group = _Peers(ranks, rank)
        coordinator.device = torch.device("cpu")
        return coordinator

    everyone = range(layout.tp * layout.dp)
    first = rank // layout.tp * layout.tp
    groups = dict.fromkeys(("_PP", "_PCP", "_DCP"), group([rank]))
    groups |= dict.fromkeys(("_TP", "_ETP"), group(range(first, first + layout.tp)))
    groups |= dict.fromkeys(("_WORLD", "_EP"), group(everyone))
    groups["_DP"] = group(everyone[rank % layout.tp :: layout.tp])
    wanted = [(parallel_state, name, value) for name, value in groups.items()]
    wanted.append((envs, "VLLM_MLA_DISABLE", not layout.latent_attention))
    before = [(module, name, getattr(module, name)) for module, name, _ in wanted]
    try:
        for module, name, value in wanted:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def _on_each_rank(
    of_rank: Callable[[int, VllmLayout, Path, str], T], source: Path, layout: VllmLayout, dtype: str
) -> list[T] | str:
    """What ``of_rank`` makes while the process stands as each rank of ``layout``; or vLLM's reason to refuse."""
    made = []
    try:
        for rank in layout.ranks:
            with standing_as(rank, layout):  # also while it loads: some loaders ask for the rank again
                made.append(of_rank(rank, layout, source, dtype))
    except Exception as error:  # noqa: BLE001  vLLM raises what pickle cannot carry
        return _reason(error)
    return made


def _describe(rank: int, layout: VllmLayout, source: Path, dtype: str) -> dict[str, Parameter]:
    return _described(_model(source, layout, rank, dtype, _ParametersOnMeta())[0])


def _configured(rank: int, layout: VllmLayout, source: Path, dtype: str) -> EffectiveConfig:
    from mcore_rl.rollout.vllm.effective_config import effective_config

    return effective_config(_model(source, layout, rank, dtype, _ParametersOnMeta())[0])


def _load(rank: int, layout: VllmLayout, source: Path, dtype: str) -> dict[str, NDArray[np.float32]]:
    return _loaded(*_model(source, layout, rank, dtype, nullcontext()))


def _place(
    shapes: dict[str, tuple[int, ...]], rank: int, layout: VllmLayout, source: Path, dtype: str
) -> dict[str, Stored]:
    model, config = _model(source, layout, rank, dtype, nullcontext())
    return _placed(model, config, list(_numbered(shapes).items()))


def _adapt(
    shapes: dict[str, tuple[int, ...]],
    modules: tuple[str, ...],
    rank: int,
    layout: VllmLayout,
    source: Path,
    dtype: str,
) -> dict[str, Stored]:
    model, config = _model(source, layout, rank, dtype, nullcontext())
    return _placed_adapters(model, config, _numbered(shapes), modules)


def _numbered(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """The tensors of ``NumberedCheckpoint``, float64."""
    checkpoint = NumberedCheckpoint(shapes)
    return {name: torch.from_numpy(checkpoint.read(name)).double() for name in checkpoint}


def _placed(model: nn.Module, config: Any, weights: list[tuple[str, torch.Tensor]]) -> dict[str, Stored]:
    from vllm.config import set_current_vllm_config

    fixed = {}
    for name, parameter in model.named_parameters():
        own = parameter.dtype != config.model_config.dtype
        fixed[name] = str(parameter.dtype).removeprefix("torch.") if own else None
        parameter.data = torch.full(parameter.shape, NOTHING, dtype=torch.float64)  # exact integers to 2**53
    with set_current_vllm_config(config):
        load_weights: Callable[[Iterable[tuple[str, torch.Tensor]]], object] = model.load_weights  # type: ignore[assignment]
        load_weights(iter(weights))
    return {
        name: Stored(parameter.detach().long().numpy(), {"dtype": fixed[name]})
        for name, parameter in model.named_parameters()
    }


def _placed_adapters(
    model: nn.Module, config: Any, tensors: Mapping[str, torch.Tensor], modules: Sequence[str]
) -> dict[str, Stored]:
    """The elements of every A and B, by vLLM's layer, ``lora_A`` or ``lora_B``, and the linear's place in the layer.

    vLLM's manager of adapters gives its layers their memory, and fills it as for a directory that PEFT saved
    (vllm/lora/model_manager.py, 0.32).

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
            model,
            max_num_seqs=1,
            max_num_batched_tokens=8,
            vocab_size=config.model_config.get_vocab_size(),
            lora_config=config.lora_config,
            vllm_config=config,
            device=torch.device("cpu"),
            lora_manager_cls=LRUCacheLoRAModelManager,
        )
        mapper = manager.model.hf_to_vllm_mapper if hasattr(manager.model, "hf_to_vllm_mapper") else None
        peft = PEFTHelper.from_dict({"r": rank, "lora_alpha": rank, "target_modules": "all-linear"})
        adapter = LoRAModel.from_lora_tensors(
            ADAPTER,
            dict(tensors),
            peft,
            device="cpu",
            dtype=torch.float64,
            model_vocab_size=config.model_config.get_vocab_size(),
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )
        manager.add_adapter(adapter)
        manager.activate_adapter(ADAPTER)
    slot = manager.lora_index_to_id.index(ADAPTER)
    placed = {}
    for name, layer in manager.modules.items():
        for source, (a, b) in enumerate(zip(layer.lora_a_stacked, layer.lora_b_stacked, strict=True)):
            for which, held in (("lora_A", a[slot, 0, :rank]), ("lora_B", b[slot, 0, :, :rank])):
                # Of the model's dtype by default.
                placed[f"{name}.{which}.{source}"] = Stored(held.long().numpy(), {"dtype": None})
    return placed


def _reason(error: Exception) -> str:
    """The message of ``error``, never empty; for pydantic's ValidationError, without the input that it repeats."""
    from pydantic import ValidationError

    if isinstance(error, ImportError):
        return f"{error}. The set-up installs vLLM: rm -rf .venv, and make test"
    if isinstance(error, ValidationError):
        return "; ".join(each["msg"] for each in error.errors())
    return f"{type(error).__name__}: {error}"


def _described(model: nn.Module) -> dict[str, Parameter]:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    experts = {}
    for prefix, module in model.named_modules():
        if isinstance(module, RoutedExperts):
            held = _held_experts(module)
            experts.update({f"{prefix}.{name}": held for name, _ in module.named_parameters()})
    return {
        name: Parameter(
            shape=tuple(parameter.shape),
            dtype=str(parameter.dtype).removeprefix("torch."),
            experts=experts.get(name, ()),
        )
        for name, parameter in model.named_parameters()
    }


def _held_experts(module: Any) -> tuple[int, ...]:
    """Global ids of the experts that ``module`` (RoutedExperts) holds, by local index."""
    manager = module.expert_map_manager
    if manager.expert_map is None:
        return tuple(range(manager.global_num_experts))
    places = {local: expert for expert, local in enumerate(manager.expert_map.tolist()) if local >= 0}
    return tuple(places[local] for local in range(len(places)))


def _loaded(model: nn.Module, config: Any) -> dict[str, NDArray[np.float32]]:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)  # so that elements that vLLM does not write are noticed
    with set_current_vllm_config(config):
        DefaultModelLoader(config.load_config).load_weights(model, config.model_config)
    arrays = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    unset = [name for name, array in arrays.items() if np.isnan(array).any()]
    if unset:
        raise ValueError(f"the checkpoint has nothing for {', '.join(unset)}")
    return arrays


class _ParametersOnMeta(TorchFunctionMode):
    """Puts the result of every ``torch.empty`` on the meta device: vLLM allocates its large parameters by it.

    Other tensors stay real: the maps of expert parallelism need values.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _model(
    source: Path, layout: VllmLayout, rank: int, dtype: str, memory: AbstractContextManager[Any]
) -> tuple[nn.Module, Any]:
    """(vLLM's model as ``rank`` builds it, parameters not set; its ``VllmConfig``).  memory: active while it builds."""
    from vllm.config import CacheConfig, DeviceConfig, LoadConfig, ModelConfig, ParallelConfig, VllmConfig
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    _ROPE_DICT.clear()  # ERNIE changes the rotations that it finds there, which a model after it would share

    _import_architecture(source)
    model_config = ModelConfig(
        model=str(source), skip_tokenizer_init=True, generation_config="vllm", dtype=dtype, enforce_eager=True
    )
    config = VllmConfig(
        model_config=model_config,
        cache_config=CacheConfig(sliding_window=_window_of_all_layers(model_config)),
        parallel_config=ParallelConfig(
            tensor_parallel_size=layout.tp,
            data_parallel_size=layout.dp,
            data_parallel_rank=rank // layout.tp,
            enable_expert_parallel=layout.expert_parallel,
            distributed_executor_backend="mp",
        ),
        load_config=LoadConfig(use_tqdm_on_load=False),
        device_config=DeviceConfig("cpu"),
    )
    with set_default_torch_dtype(config.model_config.dtype), memory:
        return initialize_model(config), config


def _window_of_all_layers(model_config: Any) -> int | None:
    """The window that layers have that are given none of their own; as ``create_engine_config`` in arg_utils.py."""
    types = model_config.hf_text_config.to_dict().get("layer_types")
    if types is not None and set(types) != {"sliding_attention"}:
        return None
    window: int | None = model_config.get_sliding_window()
    return window


def _import_architecture(source: Path) -> None:
    """Registers imported model classes in vLLM: for one that is not imported, vLLM would start a process, for seconds.

    ValueError: vLLM has no model for an architecture.
    """
    from vllm.model_executor.models.registry import ModelRegistry

    names = read_config(source).get("architectures") or []
    unknown = [name for name in names if name not in ModelRegistry.models]
    if unknown or not names:
        raise ValueError(f"config.json's architectures are {names}, of which vLLM has no model")
    for name in names:
        if "vision_config" in read_config(source) or name in torchvision_names.BESIDE_A_TOWER:
            torchvision_names.stand_in()
        ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
