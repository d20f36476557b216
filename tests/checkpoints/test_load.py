"""Loading against two references that know nothing of the tables.

Placement: bit for bit what Megatron's own checkpoint description puts where (tests/support/full_weights.py), with the
keys of hf_reference, written out by hand; padding is zero.  Meaning: log-probs of the loaded engine equal those of
transformers' ``from_pretrained`` on the same directory; both round each float32 product once and sum in other orders,
which is about 1e-6 for these widths, and the bound is 1e-5.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from mcore_rl.checkpoints.hf_directory import HfCheckpoint
from mcore_rl.checkpoints.load import check_checkpoint, load_hf
from mcore_rl.config.engine import Precision
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.role import Head
from mcore_rl.families.registry import model_of
from mcore_rl.ground.errors import CheckpointError
from mcore_rl.parallel.launch import Rank
from mcore_rl.training.engine import Engine
from mcore_rl.weights.table import Table
from tests.support import batches, checkpoints, engines, full_weights, hf_reference
from tests.support.forked import run_ranks

TOLERANCE = 1e-5
DENSE_LAYOUTS = (
    "tp=2",
    "tp=4",
    "pp=2",
    "cp=2",
    "pp=2,vpp=2",
    "tp=2,pp=2",
)  # over 4 ranks: what is left is data parallel
EXPERT_LAYOUTS = ("ep=2", "tp=2,ep=2,etp=1", "tp=2,etp=2", "etp=2,ep=2", "pp=2,ep=2")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of every family, by name."""
    directory = tmp_path_factory.mktemp("checkpoints")
    for name in checkpoints.MODELS:
        checkpoints.write(name, directory / name)
    return directory


def _described(directory: Path) -> tuple[Table, ModelConfig]:
    """As a user's checkpoint: config.json decides the family and the model."""
    family, model = model_of(json.loads((directory / "config.json").read_text()))
    return Table(family, model), model


def _engine_logprobs(rank: Rank, root: Path) -> dict[str, Tensor]:
    logprobs = {}
    with engines.world(rank), engines.groups_of() as groups:
        for name in checkpoints.MODELS:
            table, model = _described(root / name)
            with HfCheckpoint.open(root / name) as checkpoint:
                load = partial(load_hf, checkpoint=checkpoint, table=table, rank=0)
                engine = engines.build(groups, model, trainable=False, load=load)
            scores = engine.score(batches.ragged(model.vocab_size))
            assert scores.logprobs_T is not None
            logprobs[name] = scores.logprobs_T
        logprobs |= _bfloat16(root, groups)
        logprobs |= _critic(root, groups)
    return logprobs


def _bfloat16(root: Path, groups: engines.Groups) -> dict[str, Tensor]:
    """Weights cast on the way in, and the optimizer's float32 copies, which must be those of the new weights."""
    table, model = _described(root / "llama")
    with HfCheckpoint.open(root / "llama") as checkpoint:
        load = partial(load_hf, checkpoint=checkpoint, table=table, rank=0)
        engine = engines.build(groups, model, engines.config(precision=Precision.bfloat16), load=load)
    assert engine.optimizer is not None
    # Before the first step the optimizer holds main weights and, at most, moments that are zero.
    assert torch.equal(_nonzero(engine.optimizer.state_tensors()), _nonzero(engine.models[0].parameters()))
    return {"bfloat16": engine.models[0].embedding.word_embeddings.weight.detach().clone()}


def _nonzero(tensors: Iterable[Tensor]) -> Tensor:
    everything = torch.cat([tensor.detach().float().flatten() for tensor in tensors])
    return everything[everything != 0].sort().values


def _critic(root: Path, groups: engines.Groups) -> dict[str, Tensor]:
    """A critic from an actor's checkpoint keeps the value head it was built with; from a critic's it takes that."""
    logprobs = {}
    for name in ("llama", "qwen2"):
        model = checkpoints.MODELS[name]
        engine = engines.build(groups, model, head=Head.value, trainable=False)
        head = engine.models[0].output_layer.weight
        before = head.detach().clone()
        with HfCheckpoint.open(root / name) as checkpoint:
            engine.load_weights(
                partial(load_hf, checkpoint=checkpoint, table=checkpoints.table(name, head=Head.value), rank=0)
            )
        assert torch.equal(head, before), "the initial value head is lost"
        logprobs[f"{name} critic"] = engine.models[0].embedding.word_embeddings.weight.detach().clone()
    return logprobs


@pytest.fixture(scope="module")
def single(root: Path, processes: None) -> dict[str, Tensor]:
    return run_ranks(_engine_logprobs, 1, (root,))[0]


@pytest.mark.parametrize("name", checkpoints.MODELS)
def test_logprobs_are_those_of_from_pretrained(name: str, root: Path, single: dict[str, Tensor]) -> None:
    reference = AutoModelForCausalLM.from_pretrained(root / name, attn_implementation="eager")
    batch = batches.ragged(checkpoints.MODELS[name].vocab_size)
    logprobs = []
    with torch.no_grad():
        for start, length in zip(batch.offsets_S, batch.lengths_S, strict=True):
            tokens = batch.tokens_T[start : start + length]
            logits = torch.log_softmax(reference(tokens[None]).logits[0], dim=-1)
            logprobs.append(torch.cat([torch.zeros(1), logits[:-1].gather(1, tokens[1:, None])[:, 0]]))
    torch.testing.assert_close(single[name], torch.cat(logprobs), rtol=TOLERANCE, atol=TOLERANCE)


def test_weights_are_cast_and_critics_take_the_rest(root: Path, single: dict[str, Tensor]) -> None:
    embedding = checkpoints.tensors(root / "llama")["model.embed_tokens.weight"]
    assert torch.equal(single["bfloat16"], embedding.bfloat16())
    assert torch.equal(single["llama critic"], embedding)
    assert torch.equal(single["qwen2 critic"], checkpoints.tensors(root / "qwen2")["model.embed_tokens.weight"])


def _misplaced(rank: Rank, root: Path, cases: tuple[tuple[str, str], ...]) -> dict[tuple[str, str], list[str]]:
    """The tensors that are not bit for bit what Megatron's own description makes of the reference's weights."""
    misplaced_by_case = {}
    with engines.world(rank):
        references = {name: hf_reference.build(model) for name, model in checkpoints.MODELS.items()}
        for name, layout in cases:
            with engines.groups_of(layout) as groups:
                model = checkpoints.MODELS[name]
                whole = hf_reference.full_weights(references[name], model)
                load = partial(full_weights.load_full, weights=whole)
                engine = engines.build(groups, model, layout=layout, trainable=False, load=load)
                expected = _state(engine)
                for tensor in _live(engine).values():
                    tensor.fill_(float("nan"))
                _load(engine, root / name, checkpoints.table(name, layout, rank.world_size), rank.rank)
                bad = [key for key, now in _state(engine).items() if not torch.equal(now, _unpadded(expected[key]))]
                misplaced_by_case[name, layout] = bad
    return misplaced_by_case


def _load(engine: Engine, directory: Path, table: Table, rank: int) -> None:
    with HfCheckpoint.open(directory) as checkpoint:
        engine.load_weights(partial(load_hf, checkpoint=checkpoint, table=table, rank=rank))


def _live(engine: Engine) -> dict[str, Tensor]:
    return {
        f"{chunk}.{key}": tensor.detach()
        for chunk, model in enumerate(engine.models)
        for key, tensor in model.state_dict(keep_vars=True).items()
        if tensor is not None
    }


def _state(engine: Engine) -> dict[str, Tensor]:
    return {key: tensor.clone() for key, tensor in _live(engine).items()}


PADDING = 7.0  # load_full's; no weight is exactly that


def _unpadded(tensor: Tensor) -> Tensor:
    return tensor.masked_fill(tensor == PADDING, 0.0)


def _cases() -> tuple[tuple[str, str], ...]:
    dense = [(name, layout) for name in ("qwen2", "gemma2", "qwen3", "deepseek_v3") for layout in DENSE_LAYOUTS]
    rest = [(name, "tp=2,pp=2") for name in checkpoints.MODELS if (name, "tp=2,pp=2") not in dense]
    experts = [(name, layout) for name in checkpoints.WITH_EXPERTS for layout in EXPERT_LAYOUTS]
    experts = [case for case in experts if checkpoints.fits(*case)]
    return tuple(dense + rest + experts)


@pytest.fixture(scope="module")
def misplaced(root: Path, processes: None) -> list[dict[tuple[str, str], list[str]]]:
    return run_ranks(_misplaced, 4, (root, _cases()))


@pytest.mark.parametrize("case", _cases(), ids=lambda case: "-".join(case).replace("=", "").replace(",", "-"))
def test_every_rank_holds_what_megatron_says_it_does(
    case: tuple[str, str], misplaced: list[dict[tuple[str, str], list[str]]]
) -> None:
    assert [of_rank[case] for of_rank in misplaced] == [[], [], [], []]


Edit = Callable[[dict[str, Tensor]], None]
NORM, PROJECTION = "model.norm.weight", "model.layers.1.self_attn.o_proj.weight"


def _edited(root: Path, tmp_path: Path, name: str, edit: Edit, **config: object) -> Path:
    """A copy of a checkpoint as one file, its tensors edited."""
    directory = tmp_path / name
    directory.mkdir()
    held = checkpoints.tensors(root / name)
    edit(held)
    save_file({key: tensor.contiguous() for key, tensor in held.items()}, directory / "model.safetensors")
    shutil.copyfile(root / name / "config.json", directory / "config.json")
    checkpoints.edit_config(directory, **config)
    return directory


def _refusal(directory: Path) -> CheckpointError:
    table, _ = _described(directory)
    with HfCheckpoint.open(directory) as checkpoint, pytest.raises(CheckpointError) as refused:
        check_checkpoint(checkpoint, table)
    return refused.value


def _accepts(directory: Path) -> bool:
    table, _ = _described(directory)
    with HfCheckpoint.open(directory) as checkpoint:
        check_checkpoint(checkpoint, table)
    return True


def test_everything_wrong_is_said_at_once(root: Path, tmp_path: Path) -> None:
    def edit(held: dict[str, Tensor]) -> None:
        del held[NORM]
        held[PROJECTION] = held[PROJECTION][:-1]
        held["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
        held["model.layers.4.input_layernorm.weight"] = torch.zeros(48)
        held["lm_head.weight"] = held["lm_head.weight"].to(torch.int8)

    problems = _refusal(_edited(root, tmp_path, "llama", edit)).problems
    expected = (
        r"model\.norm\.weight of shape \(48,\) is missing.*HF config does not match the tensors",
        r"model\.safetensors: .*1\.self_attn\.o_proj\.weight: expected shape \(48, 64\).*found \(47, 64\).*HF config",
        r"model\.safetensors: .*lm_head\.weight: expected floating-point.*torch\.int8.*unquantised",
        r"0\.self_attn\.q_proj\.bias of shape \(64,\) has no place in the model: llama has none.*HF config",
        r"layers\.4\.input_layernorm\.weight.*config\.json says 4 layers.*HF config",
    )
    assert len(problems) == len(expected)
    for pattern in expected:
        assert [problem for problem in problems if re.search(pattern, problem)], f"{pattern} is not among {problems}"


@pytest.mark.parametrize(
    ("name", "change", "pattern"),
    [
        ("llama", {"num_hidden_layers": 3}, r"layers\.3\..*config\.json says 3 layers"),
        ("llama", {"num_hidden_layers": 5}, r"layers\.4\..* is missing"),
        ("llama", {"intermediate_size": 112}, r"up_proj.*shape \(112, 48\) by config.json and found \(96, 48\)"),
        ("llama", {"num_key_value_heads": 4}, r"k_proj.*shape \(64, 48\) by config.json and found \(32, 48\)"),
        ("llama", {"vocab_size": 102}, r"embed_tokens.* expected shape \(102, 48\)"),
        ("mixtral", {"num_local_experts": 3}, r"experts\.3\..* has no place in the model"),
        ("mixtral", {"num_local_experts": 8}, r"experts\.7\..* is missing"),
        ("qwen2", {"tie_word_embeddings": False}, r"lm_head\.weight .*is missing"),
        ("llama", {"tie_word_embeddings": True}, r"lm_head\.weight: .*not equal to model\.embed_tokens\.weight"),
    ],
)  # fmt: skip
def test_a_config_of_another_model_is_refused(
    root: Path, tmp_path: Path, name: str, change: dict[str, object], pattern: str
) -> None:
    error = _refusal(_edited(root, tmp_path, name, lambda held: None, **change))
    assert any(re.search(pattern, problem) for problem in error.problems)
    assert all("The HF config does not match the tensors" in problem for problem in error.problems)


def test_an_equal_copy_of_the_embedding_is_no_wrong_tie(root: Path, tmp_path: Path) -> None:
    def copy(held: dict[str, Tensor]) -> None:
        held["lm_head.weight"] = held["model.embed_tokens.weight"].clone()

    assert _accepts(_edited(root, tmp_path, "qwen2", copy))


@pytest.mark.parametrize("how", ["last element", "dtype", "shape"])
def test_a_wrong_tie_is_refused(root: Path, tmp_path: Path, how: str) -> None:
    def edit(held: dict[str, Tensor]) -> None:
        output = held["model.embed_tokens.weight"].clone()
        output[-1, -1] += 1
        held["lm_head.weight"] = {
            "last element": output,
            "dtype": held["model.embed_tokens.weight"].double(),
            "shape": held["model.embed_tokens.weight"][:-1].clone(),
        }[how]

    (problem,) = _refusal(_edited(root, tmp_path, "qwen2", edit)).problems
    assert "Write tie_word_embeddings=false" in problem


def test_layers_of_which_there_is_nothing_are_counted_and_not_listed(root: Path, tmp_path: Path) -> None:
    directory = _edited(root, tmp_path, "mixtral", lambda held: None)
    checkpoints.edit_config(directory, num_hidden_layers=100_000)
    table, _ = _described(directory)
    with HfCheckpoint.open(directory) as checkpoint, pytest.raises(CheckpointError) as raised:
        check_checkpoint(checkpoint, table)
    (problem,) = raised.value.problems
    assert problem.startswith("tensors model.layers.4.* (and those of 99995 other layers, up to 99999)")
    assert "hf_tensors" not in vars(table), "millions of names were made"


def test_equal_faults_are_counted(root: Path, tmp_path: Path) -> None:
    """Ten experts too many in each of four layers: two matrices of one shape, and one of another, beside the router."""
    directory = _edited(root, tmp_path, "mixtral", lambda held: None)
    moe = _described(directory)[1].moe
    assert moe is not None
    checkpoints.edit_config(directory, num_local_experts=moe.num_experts + 10)
    missing = [line for line in _refusal(directory).problems if "is missing" in line]
    counts = [int(re.findall(r"and (\d+) more like it, up to model\.layers\.3\.", line)[0]) + 1 for line in missing]
    assert sum(counts) == 4 * 10 * 3


def test_what_holds_no_weight_may_stand_there(root: Path, tmp_path: Path) -> None:
    def edit(held: dict[str, Tensor]) -> None:
        for layer in range(4):
            held[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    assert _accepts(_edited(root, tmp_path, "llama", edit))


def test_layers_behind_the_last_are_left_out_where_the_family_has_them(root: Path, tmp_path: Path) -> None:
    def edit(held: dict[str, Tensor]) -> None:
        held["model.layers.4.eh_proj.weight"] = torch.ones(48, 96)

    assert _accepts(_edited(root, tmp_path, "deepseek_v3", edit))


def test_nothing_is_written_where_the_checkpoint_is_refused(root: Path, tmp_path: Path) -> None:
    """The check comes before the first byte; a module that is not the model's is refused before that."""

    def edit(held: dict[str, Tensor]) -> None:
        del held[NORM]

    directory = _edited(root, tmp_path, "llama", edit)
    table, _ = _described(directory)
    module = _module_of(table)
    with HfCheckpoint.open(directory) as checkpoint, pytest.raises(CheckpointError, match=NORM):
        load_hf([module], checkpoint, table, 0)
    assert all(bool((parameter == 1).all()) for parameter in module.parameters())


def test_weights_with_nan_are_named(root: Path, tmp_path: Path) -> None:
    def edit(held: dict[str, Tensor]) -> None:
        held[NORM][3] = torch.nan
        held["model.layers.1.mlp.up_proj.weight"][-1, -1] = torch.nan

    directory = _edited(root, tmp_path, "llama", edit)
    table, _ = _described(directory)
    with HfCheckpoint.open(directory) as checkpoint, pytest.raises(CheckpointError) as raised:
        load_hf([_module_of(table)], checkpoint, table, 0)
    named = [line.split()[2] for line in str(raised.value).splitlines() if "holds NaN" in line]
    assert set(named) == {NORM, "model.layers.1.mlp.up_proj.weight"}


def _module_of(table: Table) -> torch.nn.Module:
    """Bare parameters under the names of rank 0's modules."""
    root = torch.nn.Module()
    for local in table.tensors(0):
        *path, last = local.name.split(".")
        module = root
        for name in path:
            if name not in module._modules:
                module.add_module(name, torch.nn.Module())
            module = module.get_submodule(name)
        module.register_parameter(last, torch.nn.Parameter(torch.ones(table.shape(local))))
    return root
