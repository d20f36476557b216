"""The weights inside a running vLLM worker: written in place, module by module, and read back as they are executed.

It uses vLLM's own layerwise reload (model_executor/model_loader/reload, 0.32), the base of all of vLLM's
weight-transfer engines: modules get unpacked tensors, which are filled, processed again, and copied into the memory
that captured graphs know.  ``write`` fills slices directly, as vLLM's sharded engine does
(distributed/weight_transfer/sharded_rdt_engine.py, ``_process_item`` and ``_run_quant``), without a loader.  A module
is processed as soon as it is complete; a tensor that needs no packing is written in place.

We also do what vLLM 0.32 forgets on the CPU:
- layers/fused_moe/unquantized_fused_moe_method.py, ``_setup_kernel``: experts are packed by ``_init_moe_kernel``'s
  kernel only while ``moe_kernel`` is None, so a reloaded layer would execute unpacked weights as packed ones.
- layers/vocab_parallel_embedding.py, ``tie_weights``: a tied lm_head is a module of its own over the embedding's
  weight, with a packed copy of it (``cpu_linear``), for which nothing is loaded and which nothing processes again.
And we skip what is not needed: vLLM packs an embedding for products even if the model only looks up rows.

Quantised engines (``rollout.quantization``): vLLM quantises a module whenever it is processed, so after each update.
The scales are parameters that it makes then; the table has none.  No rank waits for another meanwhile, since ranks
complete their modules in orders of their own: scales over several ranks are refused (``weights/quantised_shards.py``).

Read back: the CPU's linear layers keep no plain weight (layers/utils.py, ``dispatch_cpu_unquantized_gemm``).  Their
product with the identity is what they execute, exactly: every sum has one term that is not zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    _layerwise_process,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

from mcore_rl.config.rollout import Quantization
from mcore_rl.families.towers import TOWER
from mcore_rl.ground.errors import SyncError, WeightMapError
from mcore_rl.rollout.vllm.engine.picture_models import pixel_numbers
from mcore_rl.rollout.vllm.receiver.packed_weights import PACKED, unpacked_convolution, unpacked_experts
from mcore_rl.rollout.vllm.receiver.receive_memory import Blocks
from mcore_rl.weights.quantised import FP8, SCALES, STORED_BY_COLUMNS
from mcore_rl.weights.quantised_shards import is_quantised, num_scales
from mcore_rl.weights.rollout_table import RolloutTable, RolloutTensor
from mcore_rl.weights.tensor_slice import TensorSlice
from mcore_rl.weights.views import view_of

# vLLM makes these 1 at the end of every start, since no cache is quantised (attention.py, set_default_quant_scales).
CACHE_SCALES = {"_q_scale", "_k_scale", "_v_scale", "_prob_scale"}
HEAD = "lm_head.weight"  # the name of an embedding's copy
IDENTITY_ROWS = 256  # rows of the identity per call: as many tokens go through the layer


@dataclass
class _StoredAt:
    """The module and attribute of a stored tensor."""

    module: nn.Module
    attribute: str
    stored: RolloutTensor

    @property
    def tensor(self) -> Tensor:
        """The current elements, as a view; all slots of a stacked tensor."""
        whole: Tensor = getattr(self.module, self.attribute).data
        return whole[(*(slice(None),) * self.stored.rule.stacked, *self.stored.turns)]


class _LookedUp(UnquantizedEmbeddingMethod):  # type: ignore[misc]  # vLLM is not followed
    """The method of an embedding that is only looked up, never multiplied."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Does nothing: such an embedding needs no packing."""


class LiveWeights:
    """The model of one worker, checked against the tensors of rollout rank ``rank`` in ``table``.

    quantization: in which vLLM must hold its matrices.
    Raises WeightMapError with every tensor that is missing, unexpected, of another shape, or in another form.
    """

    def __init__(
        self,
        model: Any,
        vllm_config: Any,
        table: RolloutTable,
        rank: int,
        quantization: Quantization = Quantization.none,
    ) -> None:
        self.model = model
        self.vllm_config = vllm_config
        self.table = table
        self.rank = rank
        self.quantization = quantization
        self.stored = {tensor.name: tensor for tensor in table.tensors(rank)}
        self._modules = {_plain(name): module for name, module in model.named_modules()}
        self.places: dict[str, _StoredAt] = {}
        problems = [*self._missing(), *self._strangers(), *self._in_another_form(), *self._other_pixels()]
        if problems:
            raise WeightMapError(f"{table.family.name}, rollout rank {rank} of {table.layout}", problems)
        self._heads = self._heads_of_embeddings()
        for module in self._modules.values():
            if type(module) is VocabParallelEmbedding and module not in self._heads:
                assert type(module.quant_method) in (UnquantizedEmbeddingMethod, _LookedUp), "weights are unquantised"
                module.quant_method = _LookedUp()
        self._reloaded: Any = model
        self._left: dict[nn.Module, int] = {}
        self._begun: set[nn.Module] = set()
        self.blocks = Blocks(vllm_config.device_config.device)
        self.on_cpu = self.blocks.device.type == "cpu"
        self._lent: dict[nn.Module, list[Tensor]] = {}

    def _missing(self) -> Iterator[str]:
        for name, stored in self.stored.items():
            prefix, _, attribute = stored.parameter.rpartition(".")
            module = self._modules.get(prefix)
            shape = None if module is None else self._shape(module, attribute)
            if module is None or shape is None:
                yield f"{name} is in the table and not in vLLM's model. Mend families/{self.table.family.name}.py"
            elif shape != self.table.parameter_shape(stored):
                sizes = f"expected shape {self.table.parameter_shape(stored)} and found {shape}"
                yield f"{name}: {sizes}. Start vLLM with the layout that the table was made for"
            else:
                self.places[name] = _StoredAt(module, attribute, stored)

    def _strangers(self) -> Iterator[str]:
        names = [_plain(name) for name, _ in self.model.named_parameters(remove_duplicate=False)]
        # An engine may be started without the checkpoint's values.
        persistent = {_plain(name) for name in self.model.state_dict()} - set(names)
        buffers = [name for name in sorted(persistent) if name.rpartition(".")[2] not in CACHE_SCALES]
        known = {stored.parameter for stored in self.stored.values()}
        known |= {self._scales_of(stored.parameter) for stored in self.stored.values() if self.quantises(stored)}
        for name in (*dict.fromkeys(_plain(name) for name, _ in self.model.named_parameters()), *buffers):
            if name not in known:
                yield f"{name} is in vLLM's model and not in the table. Mend families/{self.table.family.name}.py"

    def _in_another_form(self) -> Iterator[str]:
        for name, place in self.places.items():
            method = vars(place.module).get("quant_method")
            held = isinstance(method, OnlineLinearBase | OnlineMoEMethodBase) and name.endswith("weight")
            if held != self.quantises(place.stored):
                forms = ("plain", "quantised") if held else (self.quantization.value, "plain")
                yield f"{name} should be {forms[0]} and vLLM holds it {forms[1]}. Mend weights/quantised.py"

    def quantises(self, stored: RolloutTensor) -> bool:
        """Whether vLLM holds ``stored`` in ``quantization``."""
        return self.quantization is not Quantization.none and is_quantised(stored.rule)

    def _scales_of(self, parameter: str) -> str:
        """The name of the parameter with the scales of ``parameter``."""
        inverse = "_inv" if self.quantization is Quantization.fp8_block else ""
        return f"{parameter}_scale{inverse}"

    def _other_pixels(self) -> Iterator[str]:
        """Numbers by which vLLM's tower normalises pixels otherwise than the trainer's; no update brings them."""
        vision = self.table.model.vision
        if vision is None:
            return
        for name, expected in pixel_numbers(vision).items():
            held = self._modules["visual.input_norm"]._buffers.get(name)
            if held is None or not torch.equal(held.cpu(), expected):
                remedy = "Start the engine with mcore_rl's models (rollout/vllm/engine/picture_models.py)"
                yield f"visual.input_norm.{name} is {held}, and {expected} normalises pixels by the model. {remedy}"

    def _shape(self, module: nn.Module, attribute: str) -> tuple[int, ...] | None:
        """The unpacked shape: as the reload remembers it, or the current one of a tensor that it leaves alone."""
        for remembered in get_layerwise_info(module).restore_metadata:
            if attribute in remembered:
                return tuple(remembered[attribute].shape)
        tensor = module._parameters.get(attribute, module._buffers.get(attribute))
        return None if tensor is None else tuple(tensor.shape)

    # Writing

    def start(self, *, tower: bool = True) -> None:
        """Prepare the modules for writing; until ``finish`` none of them can run.

        Drops the packed copies of weights: the new weights take their memory.  tower: False leaves the vision tower as
        it is, whose tensors must not be written then.
        """
        due = {name: place for name, place in self.places.items() if tower or not name.startswith(TOWER)}
        for module in {*(place.module for place in due.values()), *self._heads}:
            if hasattr(module, "cpu_linear"):
                module.cpu_linear = None
        self._reloaded = self.model if tower else self.model.language_model
        with self._vllm():
            initialize_layerwise_reload(self._reloaded)
            for module in self._modules.values():
                if _cpu_experts(module) is not None:
                    module.quant_method.moe_kernel = None  # see above
        self._forget()
        for name, place in due.items():
            self._left[place.module] = self._left.get(place.module, 0) + self.elements(name)

    def elements(self, name: str) -> int:
        """Elements of a stored tensor, without padding."""
        stored = self.stored[name]
        whole = self.table.shape(stored)
        dim = stored.rule.dim + stored.rule.stacked
        return self.table.shard(stored).held * prod(whole[:dim] + whole[dim + 1 :])

    @torch.no_grad()
    def write(self, name: str, slot: int | None, region: TensorSlice, values: Tensor) -> nn.Module | None:
        """Write ``values`` to ``region`` of a stored tensor (of expert ``slot``, if stacked); each element once.

        Returns the module that is now complete, for ``process``, or None.
        """
        module = self.places[name].module
        self._view(name, slot, region).copy_(values)
        self._left[module] -= values.numel()
        assert self._left[module] >= 0, f"{name} was written twice"
        return module if self._left[module] == 0 else None

    @torch.no_grad()
    def process(self, module: nn.Module) -> None:
        """Pack a complete module for execution.  Runs in the thread that called ``start``, in parallel to ``write``."""
        with self._vllm(), self.vllm_config.device_config.device:
            # Our tensors have left the meta device and there are no loader's arguments, so this only processes the
            # module and copies the result into the earlier tensors.
            _layerwise_process(module, get_layerwise_info(module))
        for block in self._lent.pop(module, []):
            self.blocks.take_back(block)

    def num_bytes(self, module: nn.Module) -> int:
        """Bytes of the blocks that a module holds until it is processed."""
        return sum(block.nbytes for block in self._lent.get(module, []))

    def _view(self, name: str, slot: int | None, region: TensorSlice) -> Tensor:
        place = self.places[name]
        if place.module not in self._begun:
            self._begun.add(place.module)
            with self.vllm_config.device_config.device:
                self._materialize(place.module)
                self._zero_padding(place.module)
        return view_of(place.tensor if slot is None else place.tensor[slot], region)

    def _materialize(self, module: nn.Module) -> None:
        """Does what vLLM's ``materialize_layer`` does (reload/meta.py), in existing memory.

        A tensor that the module keeps unpacked gets its own memory; one that will be packed gets a block that modules
        use one after another.
        """
        parameters, buffers = get_layerwise_info(module).kernel_tensors or ({}, {})
        kept = parameters | buffers
        for name, meta in get_layer_tensors(module).items():
            if name in SKIP_TENSORS or not meta.is_meta:
                continue
            if name in kept and _alike(kept[name], meta):
                tensor = kept[name].data
            else:
                size = meta.numel() * meta.dtype.itemsize
                block = self.blocks.lend(size)
                self._lent.setdefault(module, []).append(block)
                tensor = block[:size].view(meta.dtype).as_strided(meta.shape, meta.stride())
            tensor.__class__ = meta.__class__
            tensor.__dict__ = dict(meta.__dict__)
            setattr(module, name, tensor)

    def _zero_padding(self, module: nn.Module) -> None:
        for place in self.places.values():
            if place.module is module:
                shard = self.table.shard(place.stored)
                if shard.held < shard.size:
                    dim = place.stored.rule.dim + place.stored.rule.stacked
                    place.tensor.narrow(dim, shard.held, shard.size - shard.held).zero_()

    def unwritten(self) -> list[str]:
        """Names of the stored tensors of incomplete modules."""
        return [name for name, place in self.places.items() if self._left.get(place.module)]

    @torch.no_grad()
    def finish(self) -> None:
        """Finish the reload: the model can run again."""
        self._forget()
        with self._vllm(), self.vllm_config.device_config.device:
            finalize_layerwise_reload(self._reloaded, self.vllm_config.model_config)
            for head in self._heads:
                if isinstance(head, ParallelLMHead):
                    head.quant_method.process_weights_after_loading(head)  # see above
        # Qwen3-VL adds these to its first layers, also where no picture is.  They are no buffers, so that sleep at
        # level 2 discards them, and nothing else would bring them back (vLLM 0.32, models/qwen3_vl.py).
        for each in vars(self.model).get("deepstack_input_embeds") or ():
            each.zero_()

    def put_back(self) -> None:
        """After a failure between ``start`` and ``finish``: restore the modules, with a mix of old and new weights.

        Like ``_restore_after_dry_run`` of vLLM's sharded engine.
        """
        for module in self._modules.values():
            info = get_layerwise_info(module)
            if info.can_load():
                if info.kernel_tensors is not None:
                    _place_kernel_tensors(module, info)
                info.reset()
        self._forget()

    def _forget(self) -> None:
        self._left = {}
        self._begun = set()
        self._lent = {}
        if not self.on_cpu:  # free scarce device memory; on the CPU keep it, because new memory is slow
            self.blocks = Blocks(self.blocks.device)

    def _vllm(self) -> Any:
        return set_current_vllm_config(self.vllm_config)

    def _heads_of_embeddings(self) -> list[Any]:
        """Modules that multiply with an embedding's rows: heads tied to it, or the embedding itself (gemma2)."""
        embeddings = [module for module in self._modules.values() if type(module) is VocabParallelEmbedding]
        heads = [module for module in self._modules.values() if isinstance(module, ParallelLMHead)]
        return [head for head in heads or embeddings if any(head.weight is other.weight for other in embeddings)]

    # Reading

    def executed(self) -> Iterator[tuple[str, int | None, Iterator[tuple[tuple[int, ...], Tensor]]]]:
        """(name, slot, parts as (start, values)) of every weight that the model executes with, unpacked.

        A stacked tensor has an entry per slot.  An embedding that also makes the logits has an entry
        ``HEAD``.
        """
        for name, place in self.places.items():
            if self.quantises(place.stored):
                yield from self._quantised_parts(name, place)
                continue
            experts = _cpu_experts(place.module) if place.attribute in PACKED else None
            tensor = getattr(place.module, place.attribute).data
            if place.stored.rule.stacked:
                shape = self.table.parameter_shape(place.stored)[1:]
                for slot in range(len(place.stored.experts)):
                    plain = tensor[slot]
                    if experts is not None:
                        plain = unpacked_experts(plain, experts, place.attribute, shape)
                    plain = plain[place.stored.turns]
                    yield name, slot, iter([((0,) * plain.dim(), plain)])
            elif place.attribute == "weight" and _is_packed_convolution(place.module):
                plain = unpacked_convolution(tensor, self.table.shape(place.stored))
                yield name, None, iter([((0,) * plain.dim(), plain)])
            elif place.attribute == "weight" and self._is_product(place.module):
                yield name, None, _by_identity(place.module, self.table.shape(place.stored)[1], tensor)
            else:
                yield name, None, iter([((0,) * tensor.dim(), tensor)])
        for head in self._heads:
            if hasattr(head, "cpu_linear"):
                yield HEAD, None, _by_identity(head, head.weight.shape[1], head.weight.data)

    def _quantised_parts(
        self, name: str, place: _StoredAt
    ) -> Iterator[tuple[str, int | None, Iterator[tuple[tuple[int, ...], Tensor]]]]:
        """The bytes of a quantised tensor, uint8, and its scales, as an entry of their own."""
        held, scales = (
            getattr(place.module, attribute).data for attribute in (place.attribute, self._scales_of(place.attribute))
        )
        *slots, rows, columns = self.table.shape(place.stored)
        of_scales = num_scales(self.quantization, (rows, columns))
        if not slots and self.quantization in STORED_BY_COLUMNS:
            held = held.t()
        shapes = (tuple(held.shape), [size for size in scales.shape if size > 1])
        wanted = ((*slots, rows, columns), [size for size in (*slots, *of_scales) if size > 1])
        if held.dtype is not FP8 or shapes != wanted or not scales.is_contiguous():
            kernel = type(vars(place.module.quant_method).get("fp8_linear", place.module.quant_method)).__name__
            problem = (
                f"{name} is {held.dtype} {tuple(held.shape)} with {scales.numel()} scales: vLLM's {kernel} packs it"
            )
            raise SyncError(f"{problem}, so that it cannot be compared. Write another rollout.quantization")
        numbers: Iterable[int | None] = range(slots[0]) if slots else [None]
        for slot in numbers:
            one, its_scales = (held, scales) if slot is None else (held[slot], scales[slot])
            yield name, slot, iter([((0, 0), one.view(torch.uint8))])
            yield name + SCALES, slot, iter([((0, 0), its_scales.reshape(of_scales))])

    @staticmethod
    def _is_product(module: nn.Module) -> bool:
        """Whether the module multiplies with a packed weight; an embedding looks up its unpacked rows."""
        return hasattr(module, "cpu_linear") and type(module) is not VocabParallelEmbedding

    @property
    def names_of_heads(self) -> Mapping[str, str]:
        """Name of a copy in ``executed`` -> the stored tensor."""
        language = "" if self.table.model.vision is None else "language_model."
        return {HEAD: f"{language}model.embed_tokens.weight"} if self._heads else {}


def _plain(name: str) -> str:
    """The name without adapters: vLLM puts a layer with some around the plain one, which comes behind it."""
    return name.replace(".base_layer", "")


def _cpu_experts(module: nn.Module) -> CPUUnquantizedExperts | None:
    """The CPU's experts of a fused layer, which pack their weights; None for any other module."""
    if not isinstance(module, RoutedExperts) or not isinstance(module.quant_method, UnquantizedFusedMoEMethod):
        return None
    kernel = module.quant_method.moe_kernel
    experts = None if kernel is None else kernel.fused_experts
    return experts if isinstance(experts, CPUUnquantizedExperts) else None


def _is_packed_convolution(module: nn.Module) -> bool:
    """Whether the CPU packed the weight of a causal convolution: it then keeps a plain copy, which nothing executes."""
    return hasattr(module, "_cpu_unpacked_conv_weight")


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


def _by_identity(module: Any, width: int, weight: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Columns of the weight: the layer's outputs for rows of the identity."""
    for begin in range(0, width, IDENTITY_ROWS):
        rows = torch.zeros(min(IDENTITY_ROWS, width - begin), width, dtype=weight.dtype, device=weight.device)
        rows[torch.arange(len(rows)), begin + torch.arange(len(rows))] = 1
        yield (0, begin), module.cpu_linear(rows, weight, None).t()
