"""Reading the weights of a Hugging Face checkpoint directory: an index and its shards, or one ``model.safetensors``.

Opening the directory reads every header once and reports all problems; reading a tensor afterwards touches only the
bytes asked for.  Names are those of the files; this module knows neither ``config.json`` nor the model.
``metadata.total_size`` of the index is not checked, because published checkpoints often state another number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from mcore_rl.checkpoints.safetensors import OpenFiles, TensorInfo, read_header, read_slice
from mcore_rl.ground.errors import CheckpointError
from mcore_rl.ground.json_text import read_json
from mcore_rl.weights.tensor_slice import TensorSlice

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SCALE_SUFFIX = "_scale_inv"  # the scales of FP8 tensor NAME are NAME_scale_inv; see block_fp8


class HfCheckpoint(OpenFiles):
    """The tensors of an opened directory, and reading regions of them.

    Holds open the files that were read; ``close``, or leaving a ``with``, closes them.
    """

    def __init__(self, directory: Path, tensors: Mapping[str, TensorInfo]) -> None:
        super().__init__(directory)
        self.tensors = MappingProxyType(dict(tensors))

    @classmethod
    def open(cls, directory: Path | str) -> HfCheckpoint:
        """The checkpoint in ``directory``; its tensors in the order of shards and bytes.

        Raises CheckpointError with every violation: no safetensors files; an invalid index or header; a file that is
        missing, truncated or too long; a tensor on which index and shards disagree, or that occurs twice.
        """
        directory = Path(directory)
        try:
            shards, problems = _find_shards(directory)
        except OSError as error:
            problem = f"cannot be read: {error.strerror}. Check that it may be read"
            raise CheckpointError(str(directory), [problem]) from error
        tensors: dict[str, TensorInfo] = {}
        indexed = set[str]().union(*(names for names in shards.values() if names is not None))
        for shard, names in sorted(shards.items()):
            held, shard_problems = read_header(directory / shard)
            if names is not None and not shard_problems:
                shard_problems = _index_problems(shard, names, indexed, held, tensors)
            problems += shard_problems
            tensors.update(held)
        if problems:
            raise CheckpointError(str(directory), problems)
        return cls(directory, tensors)

    @property
    def stored(self) -> Mapping[str, TensorInfo]:
        """The tensors of the files, by the names that they have there."""
        return self.tensors

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.num_bytes for info in self.tensors.values())

    def read_into(self, name: str, region: TensorSlice, out: Tensor) -> None:
        """Copy ``region`` of tensor ``name`` into ``out``, of the region's shape, any strides, device and dtype (cast).

        Reads only the bytes of the region; see ``read_slice``.  CheckpointError: the file changed or cannot be read, or
        the tensor is quantised and ``out`` is not of its dtype (numbers without their scale are not the weights).
        """
        info = self.tensors[name]
        if out.dtype != info.dtype and name + SCALE_SUFFIX in self.tensors:
            problem = f"tensor {name} is quantised ({info.dtype} with scales in {name}{SCALE_SUFFIX})"
            remedy = "config.json must say so in quantization_config.weight_block_size"
            raise CheckpointError(str(self.directory), [f"{info.file.name}: {problem}. {remedy}"])
        self._read(info, region, out)

    def read(self, name: str) -> Tensor:
        """All of tensor ``name`` as a new CPU tensor of its dtype."""
        info = self.tensors[name]
        out = torch.empty(info.shape, dtype=info.dtype)
        self.read_into(name, TensorSlice.whole(info.shape), out)
        return out

    def _read(self, info: TensorInfo, region: TensorSlice, out: Tensor) -> None:
        read_slice(self.descriptor(info.file), info, region, out)


def _find_shards(directory: Path) -> tuple[dict[str, set[str] | None], list[str]]:
    """Shard -> the names that the index says are in it; None for a single file, which has no index."""
    if not directory.is_dir():
        remedy = "Give a local directory; download a model of the hub with: hf download ID --local-dir DIR"
        raise CheckpointError(str(directory), [f"is not a directory. {remedy}"])
    single = directory / SINGLE
    index = directory / INDEX
    if not index.exists():
        return ({SINGLE: None}, []) if single.exists() else ({}, [_nothing_to_read(directory)])
    shards, problems = _read_index(index)
    if single.exists() and SINGLE not in shards and not problems:
        # transformers 5.19 would load the single file (_get_resolved_checkpoint_files in modeling_utils.py).
        problems.append(f"holds {SINGLE} and also {INDEX}, which does not name it. Remove the one that is stale")
    return shards, problems


def _nothing_to_read(directory: Path) -> str:
    names = sorted(path.name for path in directory.iterdir())
    shards = [name for name in names if name.endswith(".safetensors")]
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    if shards:
        return f"{INDEX} is missing, but there is {_few(shards)}. Download it again, with the index"
    if pickles:
        convert = (
            "from transformers import AutoModelForCausalLM as M; "
            f"M.from_pretrained({str(directory)!r}, dtype='auto').save_pretrained('NEW_DIRECTORY')"
        )
        return f'holds only {_few(pickles)}, not safetensors. Convert it first: python -c "{convert}"'
    return f"holds neither {SINGLE} nor {INDEX}. Give the directory that has them, or download it again"


def _read_index(path: Path) -> tuple[dict[str, set[str] | None], list[str]]:
    again = "Download it again"
    try:
        content = read_json(path.read_bytes())
    except OSError as error:
        return {}, [f"{path.name}: cannot be read: {error.strerror}. Check that it may be read"]
    except ValueError as error:
        return {}, [f"{path.name}: is not JSON ({error}). {again}"]
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        return {}, [f"{path.name}: names no tensor in weight_map. {again}"]
    shards = defaultdict[str, set[str]](set)
    problems = []
    for name, shard in weight_map.items():
        if isinstance(shard, str) and Path(shard).name == shard:
            shards[shard].add(name)
        else:
            problems.append(f"{path.name}: tensor {name} is said to be in {shard!r}, which names no file beside it")
    missing = {shard for shard in shards if not (path.parent / shard).exists()}
    problems += [
        f"{shard}: is missing; {path.name} says that it holds {_few(shards[shard])}. {again}"
        for shard in sorted(missing)
    ]
    return {shard: names for shard, names in shards.items() if shard not in missing}, problems


def _index_problems(
    shard: str,
    names: Set[str],
    indexed: Set[str],
    held: Mapping[str, TensorInfo],
    earlier: Mapping[str, TensorInfo],
) -> list[str]:
    """Where ``shard`` and the index disagree.

    names: the tensors of the shard by the index.  indexed: every name in the index.  held: the tensors in the shard.
    earlier: the tensors in the shards before it.
    """
    again = "Download both again"
    problems = []
    if absent := names - held.keys():
        problems.append(f"{shard}: does not hold {_few(absent)}, which {INDEX} says it does. {again}")
    twice = held.keys() & earlier.keys()
    for other in sorted({earlier[name].file.name for name in twice}):
        both = [name for name in twice if earlier[name].file.name == other]
        problems.append(f"{shard}: holds {_few(both)}, and so does {other}. {again}")
    if extra := held.keys() - indexed - twice:
        problems.append(f"{shard}: holds {_few(extra)}, which {INDEX} does not name. {again}")
    return problems


def _few(names: Iterable[str]) -> str:
    """``names`` for a message, sorted: at most five, and how many more."""
    shown = sorted(names)
    return ", ".join(shown[:5]) + (f" and {len(shown) - 5} more" if len(shown) > 5 else "")
