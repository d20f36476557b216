"""Megatron's own modules and its own loader against what is on disk.

The reference is Megatron's description of its modules (tests/support/full_weights.py) filled with transformers'
weights under keys written out by hand (hf_reference): no table of ours has a say in it.  All equalities are bit for
bit; padding of the vocabulary is zero.
"""

from __future__ import annotations

import errno
import os
import pickle
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from mcore_rl.checkpoints.convert import HF, to_hf, to_megatron
from mcore_rl.config.parallel import parse_layout
from mcore_rl.config.role import Head
from mcore_rl.ground.errors import CheckpointError
from mcore_rl.parallel.launch import Rank
from mcore_rl.parallel.plain_objects import data_classes
from mcore_rl.training.checkpoint import EXCHANGED, _PlainWriter, load_megatron, save_megatron
from mcore_rl.training.engine import Engine
from tests.support import checkpoints, engines, full_weights, hf_reference
from tests.support.forked import run_ranks

Load = Callable[[Sequence[torch.nn.Module]], None]
LOADS = (
    *((name, "tp=2,pp=2") for name in checkpoints.MODELS),
    ("qwen2", ""), ("qwen2", "tp=4"), ("qwen2", "pp=2,vpp=2"), ("mixtral", "ep=4"), ("mixtral", "tp=2,ep=2,etp=2"),
    ("deepseek_v3", "pp=2,ep=2"), ("deepseek_v3", "etp=2,ep=2"),
)  # fmt: skip
ALONE = ("qwen2", "mixtral", "deepseek_v3")
SAVES = dict.fromkeys(checkpoints.MODELS, "tp=2,pp=2") | {
    "qwen2": "pp=2,vpp=2", "mixtral": "ep=4", "qwen3_moe": "tp=2,ep=2,etp=2", "deepseek_v3": "pp=2,ep=2",
}  # fmt: skip
# All layers in one tensor each, as Megatron-LM saves them; under which keys.
STACKED = (("llama", "tp=2,pp=2", ""), ("qwen2", "pp=2", "model."), ("mixtral", "tp=2,ep=2", "module."))
CUT_FOR = {"mixtral": "tp=2,ep=2,etp=2", "qwen2": "tp=2", "deepseek_v3": "ep=4"}


def _quiet(stage: str, num_bytes: int, total: int) -> None: ...


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of every family a Hugging Face checkpoint, ``NAME``, and our Megatron checkpoint of it, ``NAME-megatron``."""
    directory = tmp_path_factory.mktemp("checkpoints")
    for name in checkpoints.MODELS:
        checkpoints.write(name, directory / name)
        layout = parse_layout(CUT_FOR.get(name, ""))
        to_megatron(directory / name, directory / f"{name}-megatron", parallel=layout, report=_quiet)
    models = checkpoints.MODELS.items()
    full = {name: hf_reference.full_weights(hf_reference.build(model), model) for name, model in models}
    torch.save(full, directory / "full.pt")
    return directory


class _Runs:
    """What the ranks do, with one set of references; every method is collective."""

    def __init__(self, rank: Rank, root: Path) -> None:
        self.rank, self.root = rank, root
        self.full = torch.load(root / "full.pt", mmap=True)

    def engine(self, name: str, layout: str, groups: engines.Groups) -> Engine:
        """With the reference's weights."""
        load = partial(full_weights.load_full, weights=self.full[name])
        return engines.build(groups, checkpoints.MODELS[name], layout=layout, trainable=False, load=load)

    def wrong(self, name: str, layout: str, load: Load, *, any_padding: bool = False) -> list[str]:
        """The tensors that are not the reference's after ``load``, where padding, which load_full marks by 7, is 0."""
        with engines.groups_of(layout) as groups:
            engine = self.engine(name, layout, groups)
            expected = {key: tensor.clone() for key, tensor in _live(engine).items()}
            for tensor in _live(engine).values():
                tensor.fill_(float("nan"))
            engine.load_weights(load)
            keys = []
            for key, tensor in _live(engine).items():
                padding = expected[key] == 7.0
                wanted = torch.where(padding, tensor if any_padding else torch.zeros(()), expected[key])
                keys += [] if torch.equal(tensor, wanted) else [key]
            return keys

    def save(self, name: str, layout: str, out: Path | None = None) -> None:
        with engines.groups_of(layout) as groups:
            out = out or self.root / f"saved-{name}-{layout}"
            save_megatron(self.engine(name, layout, groups).models, out, self.root / name)

    def save_stacked(self, name: str, layout: str, prefix: str) -> None:
        """As Megatron-LM: homogeneous, with an optimizer's and a random state beside the weights."""
        out = self.root / f"stacked-{name}"
        if self.rank.rank == 0:
            out.mkdir()
        dist.barrier()
        with engines.groups_of(layout) as groups:
            state = {}
            for chunk, model in enumerate(self.engine(name, layout, groups).models):
                if model.config.num_moe_experts:
                    model.config.moe_layer_freq = 1  # a list makes every layer a tensor of its own
                state |= {
                    f"{chunk}.{key}": value
                    for key, value in model.sharded_state_dict(metadata=_stacked_metadata()).items()
                }
            for value in state.values():
                value.key = prefix + value.key
            moment = torch.full((3, 2), float(self.rank.rank))
            state["moment"] = ShardedTensor.from_rank_offsets(
                "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight", moment, (0, self.rank.rank, 4)
            )
            state["random"] = ShardedObject("rng_state", b"state", (4,), (self.rank.rank,), replica_id=0)
            with data_classes(EXCHANGED):
                dist_checkpointing.save(state | {"iteration": 7}, str(out), _PlainWriter("torch_dist", 1))

    def megatron_alone(self, name: str, layout: str) -> list[str]:
        """Megatron's loader by itself, strict: no key may be missing and none left over."""

        def load(models: Sequence[torch.nn.Module]) -> None:
            states = {}
            for n, model in enumerate(models):
                state = model.sharded_state_dict(metadata=_metadata())
                # Transformer Engine's own state, which holds no weight: Megatron-LM's strictness log_all drops it too.
                states[str(n)] = {key: value for key, value in state.items() if not key.endswith("_extra_state")}
            with data_classes(EXCHANGED):
                loaded = dist_checkpointing.load(states, str(self.root / f"{name}-megatron"), strict="raise_all")
            for n, model in enumerate(models):
                missing = model.load_state_dict(loaded[str(n)], strict=False).missing_keys
                assert all(key.endswith("_extra_state") for key in missing)

        return self.wrong(name, layout, load)


def _metadata() -> dict[str, object]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {"non_homogeneous_layers": True, "dp_cp_group": group}


def _stacked_metadata() -> dict[str, object]:
    return _metadata() | {"non_homogeneous_layers": False}


def _live(engine: Engine) -> dict[str, Tensor]:
    return {
        f"{chunk}.{key}": tensor.detach()
        for chunk, model in enumerate(engine.models)
        for key, tensor in model.state_dict(keep_vars=True).items()
        if tensor is not None
    }


def _refusal(runs: _Runs, name: str, layout: str, directory: Path) -> str:
    try:
        runs.wrong(name, layout, partial(load_megatron, directory=directory, model=checkpoints.MODELS[name]))
    except CheckpointError as error:
        return str(error)
    return "accepted"


def _on_four(rank: Rank, root: Path) -> dict[object, object]:
    results: dict[object, object] = {}
    with engines.world(rank):
        runs = _Runs(rank, root)
        for name, layout in LOADS:
            load = partial(load_megatron, directory=root / f"{name}-megatron", model=checkpoints.MODELS[name])
            results["load", name, layout] = runs.wrong(name, layout, load)
        for name in ALONE:
            results["alone", name] = runs.megatron_alone(name, "tp=2,pp=2")
        for name, layout in SAVES.items():
            runs.save(name, layout)
        for name, layout, prefix in STACKED:
            runs.save_stacked(name, layout, prefix)
            load = partial(load_megatron, directory=root / f"stacked-{name}", model=checkpoints.MODELS[name])
            results["stacked", name] = runs.wrong(name, "pp=2,tp=2", load, any_padding=True)  # saved as it was
        results["other layers"] = _refusal(runs, "llama", "tp=2,pp=2", root / "shallow")
        results["other family"] = _refusal(runs, "qwen2", "tp=2,pp=2", root / "nameless")
        results["other model"] = _refusal(runs, "qwen2", "tp=2,pp=2", root / "llama-megatron")
        results["again"] = _refused_save(runs, "llama")
        if rank.rank == 2:
            FileSystemWriter.write_data = _no_space
        results["disk is full"] = _refused_save(runs, "qwen3_moe", root / "full")
    return results


def _no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _refused_save(runs: _Runs, name: str, out: Path | None = None) -> str:
    try:
        runs.save(name, SAVES[name], out)
    except CheckpointError as error:
        return str(error)
    return "saved"


@pytest.fixture(scope="module")
def on_four(root: Path, processes: None) -> list[dict[object, object]]:
    _shallow(root)
    return run_ranks(_on_four, 4, (root,))


def _shallow(root: Path) -> None:
    """``llama-megatron`` without its last layer, and one without its configuration."""
    shutil.copytree(root / "llama-megatron", root / "nameless", ignore=shutil.ignore_patterns(HF))
    shutil.copytree(root / "llama-megatron", root / "shallow")
    path = root / "shallow" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for key in [key for key in metadata.state_dict_metadata if key.startswith("decoder.layers.3.")]:
        del metadata.state_dict_metadata[key]
    path.write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(("name", "layout"), LOADS)
def test_every_layout_loads_what_we_write(name: str, layout: str, on_four: list[dict[object, object]]) -> None:
    assert [of_rank["load", name, layout] for of_rank in on_four] == [[]] * 4


@pytest.mark.parametrize("name", ALONE)
def test_megatron_loads_it_by_itself(name: str, on_four: list[dict[object, object]]) -> None:
    assert [of_rank["alone", name] for of_rank in on_four] == [[]] * 4


@pytest.mark.parametrize(("name", "layout"), SAVES.items())
def test_what_an_engine_saves_goes_back_to_hugging_face(
    name: str, layout: str, root: Path, tmp_path: Path, on_four: list[dict[object, object]]
) -> None:
    to_hf(root / f"saved-{name}-{layout}", tmp_path / "hf", report=_quiet)
    assert engines.same_bits(checkpoints.tensors(tmp_path / "hf"), checkpoints.tensors(root / name))
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == (root / name / "tokenizer.json").read_text()


@pytest.mark.parametrize(("name", "layout", "prefix"), STACKED)
def test_what_megatron_lm_saves_goes_to_hugging_face(
    name: str, layout: str, prefix: str, root: Path, tmp_path: Path, on_four: list[dict[object, object]]
) -> None:
    metadata = pickle.loads((root / f"stacked-{name}" / ".metadata").read_bytes()).state_dict_metadata
    assert prefix + "decoder.layers.self_attention.linear_proj.weight" in metadata, "it is not stacked"
    to_hf(root / f"stacked-{name}", tmp_path / "hf", config=root / name, report=_quiet)
    assert engines.same_bits(checkpoints.tensors(tmp_path / "hf"), checkpoints.tensors(root / name))
    assert [of_rank["stacked", name] for of_rank in on_four] == [[]] * 4


def test_a_model_of_another_depth_or_family_is_refused_on_every_rank(on_four: list[dict[object, object]]) -> None:
    for of_rank in on_four:
        assert "expected 4 layers and found 3" in str(of_rank["other layers"])
        assert "linear_qkv.bias is missing" in str(of_rank["other family"])
        assert "qkv_bias: false in its own hf/config.json, true in the one given" in str(of_rank["other model"])


def test_nothing_is_overwritten(on_four: list[dict[object, object]]) -> None:
    assert all("exists and holds files" in str(of_rank["again"]) for of_rank in on_four)


def test_a_full_disk_is_said_on_every_rank(on_four: list[dict[object, object]]) -> None:
    assert all("cannot be written: rank 2: [Errno 28] No space left" in str(each["disk is full"]) for each in on_four)


def _on_one(rank: Rank, root: Path) -> list[str]:
    with engines.world(rank):
        runs = _Runs(rank, root)
        wrong = runs.wrong(
            "mixtral",
            "",
            partial(load_megatron, directory=root / "mixtral-megatron", model=checkpoints.MODELS["mixtral"]),
        )
        with engines.groups_of() as groups:
            critic = engines.build(groups, checkpoints.MODELS["qwen2"], head=Head.value, trainable=False)
            save_megatron(critic.models, root / "critic", root / "qwen2")
            head = critic.models[0].output_layer.weight.clone()
            critic.models[0].output_layer.weight.data.zero_()
            critic.load_weights(partial(load_megatron, directory=root / "critic", model=critic.model))
            torch.save(head, root / "head.pt")
            return wrong + ([] if torch.equal(critic.models[0].output_layer.weight, head) else ["value head"])


def test_one_process_and_a_critic(root: Path, tmp_path: Path, processes: None) -> None:
    assert run_ranks(_on_one, 1, (root,)) == [[]]
    to_hf(root / "critic", tmp_path / "hf", report=_quiet)
    written = checkpoints.tensors(tmp_path / "hf")
    assert torch.equal(written["score.weight"], torch.load(root / "head.pt"))
    assert "lm_head.weight" not in written
    assert "Qwen2ForSequenceClassification" in (tmp_path / "hf" / "config.json").read_text()
    assert (root / "critic" / HF / "config.json").exists()
