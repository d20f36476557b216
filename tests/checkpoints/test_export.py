"""Round trips HF -> Megatron -> HF, bit for bit, under every kind of layout, and directories that transformers loads.

What is compared with is the source directory, read by the safetensors package.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from mcore_rl.checkpoints import export
from mcore_rl.checkpoints.export import export_stream, save_hf
from mcore_rl.checkpoints.hf_directory import INDEX, HfCheckpoint
from mcore_rl.checkpoints.load import load_hf
from mcore_rl.config.role import Head
from mcore_rl.ground.errors import CheckpointError, WorkerError
from mcore_rl.parallel.launch import Rank
from mcore_rl.training.engine import Engine
from mcore_rl.weights.table import Table
from tests.support import checkpoints, engines
from tests.support.forked import run_ranks

Case = tuple[str, str, int]  # family, layout, world size
BUCKET_BYTES = 30_000  # some tensors are larger
DENSE = (("tp=2", 2), ("pp=2", 2), ("", 2), ("tp=2,pp=2", 4), ("tp=4", 4), ("pp=2,vpp=2,cp=2", 4))
EXPERTS = (("ep=2", 2), ("etp=2", 2), ("tp=2,ep=2,etp=1", 4), ("pp=2,ep=2", 4))


def _cases(world_size: int) -> tuple[Case, ...]:
    cases: list[Case] = [(name, "", 1) for name in checkpoints.MODELS]
    cases += [(name, *case) for name in ("qwen2", "gemma2", "deepseek_v3") for case in DENSE]
    cases += [(name, "tp=2", 2) for name in checkpoints.MODELS if (name, "tp=2", 2) not in cases]
    cases += [(name, *case) for name in checkpoints.WITH_EXPERTS for case in EXPERTS if checkpoints.fits(name, case[0])]
    return tuple(case for case in cases if case[2] == world_size)


ALL = [case for world_size in (1, 2, 4) for case in _cases(world_size)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints")
    for name in checkpoints.MODELS:
        checkpoints.write(name, directory / name)
    return directory


def _loaded(groups: engines.Groups, directory: Path, table: Table, layout: str, *, head: Head = Head.lm) -> Engine:
    with HfCheckpoint.open(directory) as checkpoint:
        load = partial(load_hf, checkpoint=checkpoint, table=table, rank=groups.rank)
        return engines.build(groups, table.model, layout=layout, head=head, trainable=False, load=load)


def _target(root: Path, case: Case) -> Path:
    return root / f"{case[0]}-{case[1]}-{case[2]}".replace("=", "").replace(",", "-")


def _round_trips(rank: Rank, root: Path, cases: tuple[Case, ...]) -> list[list[tuple[str, Tensor]]]:
    """For each case the stream, flattened; saves the directories."""
    streams = []
    with engines.world(rank):
        for case in cases:
            name, layout, world_size = case
            with engines.groups_of(layout) as groups:
                table = checkpoints.table(name, layout, world_size)
                engine = _loaded(groups, root / name, table, layout)
                stream: list[tuple[str, Tensor]] = []
                for bucket in export_stream(
                    engine.models, table, rank.rank, bucket_bytes=BUCKET_BYTES, dst=world_size - 1
                ):
                    assert len(bucket) == 1 or sum(tensor.nbytes for _, tensor in bucket) <= BUCKET_BYTES
                    stream += bucket
                streams.append(stream)
                written: list[int] = []
                save_hf(
                    engine.models, table, rank.rank, _target(root, case), root / name,
                    max_shard_bytes=100_000, progress=written.append,
                )  # fmt: skip
                total = torch.tensor(sum(written))
                dist.all_reduce(total)
                assert total.item() == sum(t.nbytes for t in checkpoints.tensors(root / name).values())
        if rank.world_size == 1:
            _casts(root)
        if rank.world_size == 2:
            _failures(rank, root)
    return streams


def _casts(root: Path) -> None:
    with engines.groups_of() as groups:
        table = checkpoints.table("deepseek_v3")
        engine = _loaded(groups, root / "deepseek_v3", table, "")
        save_hf(engine.models, table, 0, root / "cast", root / "deepseek_v3", dtype=torch.bfloat16)
        for name, tensor in _flat(export_stream(engine.models, table, 0, dtype=torch.bfloat16)):
            assert tensor.dtype == (torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16)
        table = checkpoints.table("llama", head=Head.value)
        engine = engines.build(groups, table.model, head=Head.value, trainable=False)
        save_hf(engine.models, table, 0, root / "critic", root / "llama")


def _flat(stream: Iterator[list[tuple[str, Tensor]]]) -> Iterator[tuple[str, Tensor]]:
    for bucket in stream:
        yield from bucket


def _failures(rank: Rank, root: Path) -> None:
    """Whatever fails, on whichever rank: all hear of it, and the name stays free."""
    table = checkpoints.table("llama", "tp=2", 2)
    with engines.groups_of("tp=2") as groups:
        engine = _loaded(groups, root / "llama", table, "tp=2")

        def stop(num_bytes: int) -> None:
            raise OSError("no route to the disk")

        for bad in range(2):
            target = root / f"failed-{bad}"
            progress = stop if rank.rank == bad else None
            with pytest.raises(OSError if rank.rank == bad else WorkerError, match="no route to the disk"):
                save_hf(engine.models, table, rank.rank, target, None, progress=progress)
            assert not target.exists()
        with pytest.raises(CheckpointError, match=r"exists and holds files"):
            save_hf(engine.models, table, rank.rank, root / "llama", None)
        with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
            save_hf(engine.models, table, rank.rank, root / "unsourced", root)
        assert not (root / "unsourced").exists()
        _unfinished(rank, root, engine, table)
        dtype = [torch.float32, torch.bfloat16][rank.rank]
        with pytest.raises(AssertionError, match="different models, layouts or dtypes"):
            list(export_stream(engine.models, table, rank.rank, dtype=dtype))


def _unfinished(rank: Rank, root: Path, engine: Engine, table: Table) -> None:
    """A plan that leaves a part out, as if a rank had not written it, does not get the name."""
    complete = export.owned_parts

    def incomplete(table: Table, prefer: int | None = None) -> export.Parts:
        parts = complete(table, prefer)
        parts["model.norm.weight"].pop()
        return parts

    export.owned_parts = incomplete
    try:
        with pytest.raises(CheckpointError, match=r"model\.norm\.weight: 0 of 48 elements"):
            save_hf(engine.models, table, rank.rank, root / "unfinished", None)
    finally:
        export.owned_parts = complete
    assert not (root / "unfinished").exists()


@pytest.fixture(scope="module")
def streams(root: Path, processes: None) -> dict[Case, list[list[tuple[str, Tensor]]]]:
    """case -> what each rank got."""
    by_case = {}
    for world_size in (1, 2, 4):
        cases = _cases(world_size)
        results = run_ranks(_round_trips, world_size, (root, cases))
        by_case |= {case: [result[index] for result in results] for index, case in enumerate(cases)}
    return by_case


def _name(case: Case) -> str:
    return _target(Path(), case).name


def _assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    different = [name for name, tensor in theirs.items() if not engines.same_bits(tensor, ours[name])]
    assert not different


@pytest.mark.parametrize("case", ALL, ids=_name)
def test_the_stream_is_the_checkpoint_on_one_rank_and_nothing_elsewhere(
    case: Case, root: Path, streams: dict[Case, list[list[tuple[str, Tensor]]]]
) -> None:
    *others, received = streams[case]
    assert all(other == [] for other in others)
    assert [name for name, _ in received] == list(checkpoints.table(case[0]).hf_tensors)
    _assert_same(dict(received), checkpoints.by_table(case[0], checkpoints.tensors(root / case[0])))


@pytest.mark.parametrize("case", ALL, ids=_name)
def test_the_directory_is_the_checkpoint(
    case: Case, root: Path, streams: dict[Case, list[list[tuple[str, Tensor]]]]
) -> None:
    source, target = root / case[0], _target(root, case)
    _assert_same(checkpoints.tensors(target), checkpoints.tensors(source))
    index = json.loads((target / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in checkpoints.tensors(source).values())
    for name, shard in index["weight_map"].items():
        with safe_open(target / shard, framework="pt") as file:
            assert name in file.keys()  # noqa: SIM118  # not a mapping
    expected = json.loads((source / "config.json").read_text())
    if "num_nextn_predict_layers" in expected:
        expected["num_nextn_predict_layers"] = 0  # such layers are not part of the policy, and are not written
    assert json.loads((target / "config.json").read_text()) == expected
    beside = {path.name for path in target.iterdir() if path.suffix != ".safetensors"}
    assert beside == {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", INDEX}


@pytest.mark.parametrize("name", checkpoints.MODELS)
def test_transformers_loads_the_directory(
    name: str, root: Path, streams: dict[Case, list[list[tuple[str, Tensor]]]]
) -> None:
    models = []
    for directory in (root / name, _target(root, (name, "tp=2", 2))):
        model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
        assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        models.append(model.state_dict())
    _assert_same(*models)


def test_a_cast_checkpoint_says_its_dtype(root: Path, streams: dict[Case, list[list[tuple[str, Tensor]]]]) -> None:
    source = checkpoints.tensors(root / "deepseek_v3")
    bias = "e_score_correction_bias"
    expected = {name: tensor if name.endswith(bias) else tensor.bfloat16() for name, tensor in source.items()}
    _assert_same(checkpoints.tensors(root / "cast"), expected)
    assert json.loads((root / "cast" / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(root / "cast").dtype == torch.bfloat16


def test_transformers_loads_a_critic(root: Path, streams: dict[Case, list[list[tuple[str, Tensor]]]]) -> None:
    held = checkpoints.tensors(root / "critic")
    assert "lm_head.weight" not in held
    model, info = AutoModelForSequenceClassification.from_pretrained(root / "critic", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(model.score.weight, held["score.weight"])
