"""Directories of adapters: PEFT loads what we write and computes the same, what PEFT saved is read, refusals say why.

Models with experts: transformers keeps the experts of a layer in one tensor, and PEFT converts adapters of each expert.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from mcore_rl.checkpoints.convert import extract, merge, open_hf, to_hf
from mcore_rl.checkpoints.hf_sidecar_files import copy_sidecar_files
from mcore_rl.checkpoints.manifest import write_manifest
from mcore_rl.checkpoints.peft import (
    CONFIG,
    PLAIN,
    READ,
    WEIGHTS,
    WITHOUT_EFFECT,
    lora_of,
    open_peft,
    read_adapter_config,
    write_adapter_config,
    write_peft,
)
from mcore_rl.checkpoints.rank_state import MAIN, SIDECAR_FILES, RankState, StateShard, pieces_of_range, state_file
from mcore_rl.config.lora import ALL_LINEAR, LoraConfig
from mcore_rl.config.role import Head
from mcore_rl.families.config_json import read_config
from mcore_rl.families.registry import FAMILIES, model_of
from mcore_rl.ground.errors import CheckpointError
from mcore_rl.proofs.mutation import has_experts
from mcore_rl.weights.adapter_table import AdapterTable
from mcore_rl.weights.table import Table
from mcore_rl.weights.views import view_of
from tests.support import adapters, text_parts, tiny_models
from tests.support.full_weights import Weights
from tests.support.published import TINY

LORA = LoraConfig(rank=4, alpha=6.0, use_rslora=True)
TOKENS = torch.tensor([[5, 17, 99, 20, 34, 7, 8, 11]])


def _quiet(stage: str, num_bytes: int, total: int) -> None: ...


def _written(kind: str, root: Path, lora: LoraConfig = LORA) -> tuple[Path, Path, Weights]:
    """(a tiny model, a directory of its adapters that we wrote, these adapters)."""
    tiny_models.save(kind, root / "base")
    table = AdapterTable(Table(*model_of(read_config(root / "base"))), lora)
    given = adapters.drawn(table)
    write_peft(given, table, root / "adapter", str(root / "base"))
    return root / "base", root / "adapter", given


def _logits(directory: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()(TOKENS).logits


EXPERTS = [name for name in FAMILIES if has_experts(TINY[name])]


@pytest.mark.parametrize("rslora", [False, True], ids=["plain", "rslora"])
@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        *((kind, [ALL_LINEAR]) for kind in ("qwen2", "phi3", *EXPERTS)),
        ("mixtral", ["q_proj", "lm_head"]),
        ("mixtral", ["w1"]),
        ("qwen3_moe", ["down_proj"]),
        ("gpt_oss", ["up_proj"]),
    ],
    ids=lambda given: given if isinstance(given, str) else "-".join(given),
)
def test_peft_computes_what_the_merged_model_does(kind: str, targets: list[str], rslora: bool, tmp_path: Path) -> None:
    """The merged model is ours, and held against float64 by hand below; PEFT applies the adapters by itself."""
    base, directory, given = _written(kind, tmp_path, replace(LORA, use_rslora=rslora, target_modules=targets))
    done = merge(base, directory, tmp_path / "merged", report=_quiet)
    assert done.directory == tmp_path / "merged"
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), directory)
    with torch.no_grad():
        theirs = loaded.eval()(TOKENS).logits
    assert (theirs - _logits(base)).abs().max() > 1e-2, "the adapters do something"
    # float32, of sums in another order; a recurrence over the tokens adds them up.
    tolerance = 5e-4 if kind in ("qwen3_next", "qwen3_5_moe_text") else 5e-5
    torch.testing.assert_close(_logits(tmp_path / "merged"), theirs, rtol=1e-5, atol=tolerance)
    table = AdapterTable(Table(*model_of(read_config(base))), replace(LORA, use_rslora=rslora, target_modules=targets))
    with open_peft(directory, table) as held:
        assert held.tensors.keys() == given.keys()
        assert all(torch.equal(held.read(name), tensor) for name, tensor in given.items()), "read as it was written"


@pytest.mark.tier("ci")  # vLLM takes half a minute to import
@pytest.mark.parametrize("rslora", [False, True], ids=["plain", "rslora"])
@pytest.mark.parametrize("kind", EXPERTS)
def test_vllm_takes_the_experts_adapters_apart_as_they_were(kind: str, rslora: bool, tmp_path: Path) -> None:
    """With ``--enable-mixed-moe-lora-format`` and ``is_3d_lora_weight``.  Its kernels for them need a GPU."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.peft_helper import PEFTHelper

    lora = replace(LORA, use_rslora=rslora)
    base, directory, given = _written(kind, tmp_path, lora)
    helper = PEFTHelper.from_local_dir(str(directory), None)
    assert max(helper.r, *helper.rank_pattern.values()) == 2 * lora.rank, "--max-lora-rank"
    modules = {name.removeprefix(adapters.PEFT).rpartition(".lora_")[0].rpartition(".")[2] for name in given}
    loaded = LoRAModel.from_local_checkpoint(str(directory), modules | {"experts"}, helper, device="cpu")
    for each in loaded.loras.values():
        each.optimize()
    config = SimpleNamespace(**read_config(base))
    manager = SimpleNamespace(_get_lora_layer_weights=LoRAModel.get_lora, model=SimpleNamespace(config=config))
    spelt_as_mixtral = kind in ("mixtral", "minimax_m2")
    w = ("w1", "w2", "w3") if spelt_as_mixtral else ("gate_proj", "down_proj", "up_proj")
    layers = [name for name in loaded.loras if name.endswith(".mlp.experts")]
    assert layers
    for layer in layers:
        num_experts = loaded.loras[layer].lora_a.shape[0] // lora.rank
        module = SimpleNamespace(local_num_experts=num_experts, global_num_experts=num_experts, ep_rank=0)
        LoRAModelManager._convert_3d_to_2d_moe_lora(manager, loaded, module, layer)
        held = loaded.loras[layer]
        for place, name in enumerate(w):
            for expert in range(num_experts):
                stem = f"{adapters.PEFT}{layer}.{expert}.{name}"
                stem = stem.replace(".mlp.", ".block_sparse_moe.") if spelt_as_mixtral else stem
                a, b = (given[f"{stem}.lora_{which}.weight"] for which in "AB")
                torch.testing.assert_close(held.lora_b[place][expert] @ held.lora_a[place][expert], lora.scale * b @ a)


def test_merged_tensors_by_hand(tmp_path: Path) -> None:
    base, directory, given = _written("qwen2", tmp_path)
    merge(base, directory, tmp_path / "merged", report=_quiet)
    before, after = load_file(base / "model.safetensors"), load_file(tmp_path / "merged" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        stem = f"{adapters.PEFT}{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" not in given:
            assert torch.equal(after[name], tensor), name
            continue
        a, b = (given[f"{stem}.lora_{which}.weight"].double() for which in "AB")
        exact = tensor.double() + 6.0 / 4**0.5 * (b @ a)
        torch.testing.assert_close(after[name], exact.float(), rtol=1e-6, atol=1e-7)


def test_what_peft_saved_is_read(tmp_path: Path) -> None:
    tiny_models.save("qwen2", tmp_path / "base")
    config = peft.LoraConfig(
        r=4, lora_alpha=6.0, use_rslora=True, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM",
        init_lora_weights=False,
    )  # fmt: skip
    wrapped = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), config)
    wrapped.save_pretrained(tmp_path / "theirs")
    lora = lora_of(read_adapter_config(tmp_path / "theirs"))
    assert replace(lora, target_modules=sorted(lora.target_modules)) == replace(
        LORA, target_modules=["down_proj", "q_proj"]
    )
    with open_peft(tmp_path / "theirs", AdapterTable(Table(*model_of(read_config(tmp_path / "base"))), lora)) as held:
        saved = load_file(tmp_path / "theirs" / WEIGHTS)
        assert saved.keys() == held.tensors.keys() and all(torch.equal(held.read(name), saved[name]) for name in saved)


def test_adapters_of_another_kind_are_refused_by_name(tmp_path: Path) -> None:
    base, directory, given = _written("qwen2", tmp_path)
    table = AdapterTable(Table(*model_of(read_config(base))), LORA)
    with open_peft(directory, table):
        pass

    def refusal(wanted: AdapterTable, weights: Weights | None = None, **fields: object) -> str:
        wrong = tmp_path / "wrong"
        shutil.rmtree(wrong, ignore_errors=True)
        shutil.copytree(directory, wrong)
        config = json.loads((wrong / CONFIG).read_text()) | fields
        (wrong / CONFIG).write_text(json.dumps(config))
        if weights is not None:
            save_file(weights, wrong / WEIGHTS)
        with pytest.raises(CheckpointError) as raised:
            open_peft(wrong, wanted)
        return str(raised.value)

    assert "use_dora=True" in refusal(table, use_dora=True)
    assert "peft_type=IA3" in refusal(table, peft_type="IA3")
    for name, value in {
        "init_lora_weights": "pissa_niter_4", "alora_invocation_tokens": [1], "use_qalora": True, "lora_alpha": None,
        "layer_replication": [[0, 2]], "trainable_token_indices": [3], "r": True,
    }.items():  # fmt: skip
        assert f"{name}={value}" in refusal(table, **{name: value})
    with open_peft(_changed(directory, tmp_path / "same", init_lora_weights="gaussian"), table):
        pass
    other = AdapterTable(table.base, replace(LORA, rank=8, alpha=32.0))
    said = refusal(other)
    assert "r=4, and the run has 8" in said and "lora_alpha=6.0, and the run has 32.0" in said
    assert "has shape (4, " in said and "q_proj.lora_A.weight" in said
    name = next(name for name in given if "q_proj.lora_B" in name)
    assert f"tensor {name} of shape" in refusal(table, {key: value for key, value in given.items() if key != name})
    assert "tensor x.lora_A.weight is of no layer" in refusal(table, given | {"x.lora_A.weight": torch.zeros(2, 2)})
    (directory / CONFIG).unlink()
    with pytest.raises(CheckpointError, match=r"adapter_config\.json cannot be read"):
        open_peft(directory, table)


def _changed(directory: Path, to: Path, **fields: object) -> Path:
    shutil.copytree(directory, to)
    (to / CONFIG).write_text(json.dumps(json.loads((to / CONFIG).read_text()) | fields))
    return to


def _of_run(root: Path, table: AdapterTable, given: Weights, base: Path) -> Path:
    """A checkpoint of one rank of a run that trains the tensors of ``table``; returns the directory of the role."""
    role = root / "step_1" / "actor"
    (role / SIDECAR_FILES).mkdir(parents=True)
    shards, tensors = [], {}
    for local in table.tensors(0):
        tensor, name = torch.zeros(table.shape(local)), f"{local.chunk}/{local.name}"
        for piece in table.pieces(local):
            view_of(tensor, piece.local_region).copy_(view_of(given[piece.hf], piece.hf_region))
        pieces = pieces_of_range(table.pieces(local), tuple(tensor.shape), 0, tensor.numel())
        shards.append(StateShard(name, tuple(tensor.shape), 0, tensor.numel(), pieces, (MAIN,)))
        tensors[f"{MAIN}/{name}"] = tensor.view(-1)
    state = RankState(
        role="actor", rank=0, world_size=1, layout="", head=table.head, dtype="float32", num_steps=1, num_skipped=0,
        adam_step=None, shards=tuple(shards),
    )  # fmt: skip
    save_file(tensors, state_file(role, 0), state.metadata())
    copy_sidecar_files(base, role / SIDECAR_FILES, torch.float32, head=table.head)
    write_adapter_config(table, role / SIDECAR_FILES, str(base))
    write_manifest(root / "step_1", {})
    return role


def test_a_runs_adapters_are_merged_under_its_own_config(tmp_path: Path) -> None:
    """Also if ``--base`` is the model before the run's changes of config.json; a damaged file is refused."""
    tiny_models.save("qwen2", tmp_path / "base")
    table = AdapterTable(Table(*model_of(read_config(tmp_path / "base"))), LORA)
    role = _of_run(tmp_path, table, adapters.drawn(table), tmp_path / "base")
    config = json.loads((role / SIDECAR_FILES / "config.json").read_text()) | {"max_position_embeddings": 77}
    (role / SIDECAR_FILES / "config.json").write_text(json.dumps(config))
    write_manifest(role.parent, {})
    to_hf(role, tmp_path / "out", base=tmp_path / "base", report=_quiet)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["max_position_embeddings"] == 77
    assert not (tmp_path / "out" / CONFIG).exists(), "transformers would take the directory for adapters"
    extract(role, tmp_path / "adapter")
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged", report=_quiet)
    one, other = (load_file(tmp_path / each / "model.safetensors") for each in ("out", "merged"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)

    path = state_file(role, 0)
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    for convert in (lambda: to_hf(role, tmp_path / "bad", report=_quiet), lambda: extract(role, tmp_path / "bad")):
        with pytest.raises(CheckpointError, match="has other bytes than were written"):
            convert()


def test_what_reads_back_differently_gets_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flawed(tensors: Weights, path: Path, metadata: dict[str, str]) -> None:
        first = next(iter(tensors))
        save_file(tensors | {first: tensors[first] + 1}, path, metadata)

    monkeypatch.setattr("mcore_rl.checkpoints.peft.save_file", flawed)
    with pytest.raises(CheckpointError, match="reads back differently"):
        _written("qwen2", tmp_path)
    assert not (tmp_path / "adapter").exists()


def test_a_critic_keeps_the_head_that_it_trained(tmp_path: Path) -> None:
    tiny_models.save("qwen2", tmp_path / "base")
    table = AdapterTable(Table(*model_of(read_config(tmp_path / "base")), head=Head.value), LORA)
    given = adapters.drawn(table)
    role = _of_run(tmp_path, table, given, tmp_path / "base")
    to_hf(role, tmp_path / "out", config=tmp_path / "base", report=_quiet)
    before, after = (load_file(tmp_path / each / "model.safetensors") for each in ("base", "out"))
    assert torch.equal(after.pop("score.weight"), given["score.weight"])
    assert after.keys() == before.keys() - {"lm_head.weight"}
    name = "model.layers.0.self_attn.q_proj"
    a, b = (given[f"{adapters.PEFT}{name}.lora_{which}.weight"] for which in "AB")
    torch.testing.assert_close(after[f"{name}.weight"], before[f"{name}.weight"] + LORA.scale * (b @ a))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_labels"] == 1


def test_adapters_without_a_partner_are_not_merged(tmp_path: Path) -> None:
    base, directory, given = _written("qwen2", tmp_path)
    name = next(name for name in given if "q_proj.lora_B" in name)
    save_file({key: value for key, value in given.items() if key != name}, directory / WEIGHTS)
    with pytest.raises(CheckpointError, match="is of no layer of the model, or alone"):
        merge(base, directory, tmp_path / "merged", report=_quiet)
    save_file(given | {name: torch.zeros(3, 4)}, directory / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"q_proj.weight have shapes \(4, .*\) and \(3, 4\)"):
        merge(base, directory, tmp_path / "merged", report=_quiet)
    assert not (tmp_path / "merged").exists()


def test_adapters_of_another_rank_than_their_file_says_are_not_merged(tmp_path: Path) -> None:
    """They would be merged with another scale, alpha / r, in silence."""
    base, directory, given = _written("qwen2", tmp_path)
    config = json.loads((directory / CONFIG).read_text())
    (directory / CONFIG).write_text(json.dumps(config | {"r": 2 * config["r"]}))
    said = rf"{len(given)} of {len(given)} tensors, the first \S+, have the rank {config['r']}, .* r={2 * config['r']}"
    with pytest.raises(CheckpointError, match=said):
        merge(base, directory, tmp_path / "merged", report=_quiet)
    assert not (tmp_path / "merged").exists()


# ---- what PEFT trained, and its merged model ----

PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
OF_EXPERTS = [f"experts.{{e}}.{name}_proj" for name in ("gate", "up", "down")]
# None: routers have no adapters in a run.
TRAINED: dict[str, tuple[str, dict[str, object], LoraConfig | None]] = {
    "patterns": (
        "qwen2",
        {"target_modules": ["q_proj", "down_proj"], "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.down_proj": 6},
         "alpha_pattern": {"down_proj": 1.5}},
        LoraConfig(rank=6, alpha=9.0, target_modules=["q_proj", "down_proj"]),
    ),
    "patterns with rslora": (
        "qwen2",
        {"target_modules": ["o_proj"], "use_rslora": True, "rank_pattern": {"layers.0.self_attn.o_proj": 2}},
        LoraConfig(rank=4, alpha=6.0, use_rslora=True, target_modules=["o_proj"]),
    ),
    "some layers": (
        "qwen2",
        {"target_modules": ["v_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
        LoraConfig(rank=4, alpha=6.0, target_modules=["v_proj"]),
    ),
    "experts": (
        "qwen3_moe",
        {"target_modules": ["q_proj"], "target_parameters": PARAMETERS, "rank_pattern": {"gate_up_proj": 3}},
        LoraConfig(rank=4, alpha=6.0, target_modules=["q_proj", *OF_EXPERTS]),
    ),
    "experts' down alone": (
        "gpt_oss",
        {"target_modules": [], "target_parameters": PARAMETERS[1:], "use_rslora": True,
         "alpha_pattern": {"down_proj": 2}},
        LoraConfig(rank=4, alpha=6.0, use_rslora=True, target_modules=OF_EXPERTS[2:]),
    ),
    "experts in turns": (
        "gpt_oss",
        {"target_modules": ["o_proj"], "target_parameters": PARAMETERS[:1]},
        LoraConfig(rank=4, alpha=6.0, target_modules=["o_proj", *OF_EXPERTS[:2]]),
    ),
    "every linear layer, the router too": ("mixtral", {"target_modules": "all-linear"}, None),
    "the router's parameter": (
        "qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight"]}, None,
    ),
    "experts, named in another order": (
        "gpt_oss", {"target_modules": [], "target_parameters": PARAMETERS[::-1], "rank_pattern": {"down_proj": 2}},
        LoraConfig(rank=4, alpha=6.0, target_modules=OF_EXPERTS),
    ),
    "experts of one layer": (
        "qwen3_moe", {"target_modules": [], "target_parameters": PARAMETERS, "layers_to_transform": [1]},
        LoraConfig(rank=4, alpha=6.0, target_modules=OF_EXPERTS),
    ),
    "the output projection": (
        "mixtral", {"target_modules": ["lm_head", "k_proj"]},
        LoraConfig(rank=4, alpha=6.0, target_modules=["lm_head", "k_proj"]),
    ),
}  # fmt: skip


def _trained(kind: str, root: Path, **options: object) -> torch.Tensor:
    """Logits of a model that PEFT adapted with ``options``; its directory is ``root / "theirs"``."""
    tiny_models.save(kind, root / "base")
    torch.manual_seed(1)
    made = {"r": 4, "lora_alpha": 6.0, "task_type": "CAUSAL_LM", "init_lora_weights": False} | options
    base = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32)
    wrapped = peft.get_peft_model(base, peft.LoraConfig(**made))  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn_like(parameter))
    wrapped.save_pretrained(root / "theirs")
    with torch.no_grad():
        return wrapped.eval()(TOKENS).logits


@pytest.mark.parametrize("case", list(TRAINED))
def test_what_peft_trained_is_merged_and_trained_on(case: str, tmp_path: Path) -> None:
    """Merged without a run; and read into a run's adapters, of one rank and scale, which PEFT then reads again."""
    kind, options, lora = TRAINED[case]
    theirs = _trained(kind, tmp_path, **options)
    assert (theirs - _logits(tmp_path / "base")).abs().max() > 1e-2, "the adapters do something"
    merge(tmp_path / "base", tmp_path / "theirs", tmp_path / "merged", report=_quiet)
    torch.testing.assert_close(_logits(tmp_path / "merged"), theirs, rtol=1e-5, atol=5e-5)
    if lora is None:
        return
    table = AdapterTable(Table(*model_of(read_config(tmp_path / "base"))), lora)
    with open_peft(tmp_path / "theirs", table) as held:
        ours = {name: held.read(name).float() for name in held.tensors}
    assert {name: tuple(tensor.shape) for name, tensor in ours.items()} == {
        name: info.shape for name, info in table.hf_tensors.items()
    }
    write_peft(ours, table, tmp_path / "ours", str(tmp_path / "base"))
    merge(tmp_path / "base", tmp_path / "ours", tmp_path / "again", report=_quiet)
    torch.testing.assert_close(_logits(tmp_path / "again"), theirs, rtol=1e-5, atol=5e-5)


def test_a_changed_output_projection_is_refused(tmp_path: Path) -> None:
    """PEFT saves it beside its adapters; the one of the model is no news (above)."""
    _trained("mixtral", tmp_path, target_modules=["lm_head"])
    weights = load_file(tmp_path / "theirs" / WEIGHTS)
    (name,) = (name for name in weights if name.endswith("lm_head.base_layer.weight"))
    weights[name] = weights[name] + 1
    save_file(weights, tmp_path / "theirs" / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"is not lm_head.weight of .* the model changed. Merge them with PEFT"):
        merge(tmp_path / "base", tmp_path / "theirs", tmp_path / "merged", report=_quiet)


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_adapters_of_the_embedding_are_refused_with_what_helps(target: str, tmp_path: Path) -> None:
    """Of a model whose output projection is its embedding, too."""
    tied = tiny_models.TINY["qwen2"]["tie_word_embeddings"]
    assert tied, "the model of this test"
    _trained("qwen2", tmp_path, target_modules=["q_proj", target])
    with pytest.raises(CheckpointError, match=rf"{target}\S* is of no layer .*PEFT merges them \(docs/lora.md\)"):
        merge(tmp_path / "base", tmp_path / "theirs", tmp_path / "merged", report=_quiet)


def _run_lines(said: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the command that the message ``said`` gives."""
    (code,) = re.findall(r'python -c "(.+?)"', said)
    (root / "theirs").rename(root / "DIR")
    monkeypatch.chdir(root)
    exec(code, {})


def test_what_only_peft_computes_is_merged_by_the_lines_of_the_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = _trained("qwen2", tmp_path, target_modules=["q_proj"], use_dora=True)
    with pytest.raises(CheckpointError, match="use_dora=True: computes what is not computed here") as raised:
        merge(tmp_path / "base", tmp_path / "theirs", tmp_path / "merged", report=_quiet)
    _run_lines(str(raised.value), tmp_path, monkeypatch)
    open_hf(tmp_path / "NEW")
    torch.testing.assert_close(_logits(tmp_path / "NEW"), theirs, rtol=1e-5, atol=5e-5)


def test_pickled_adapters_are_written_anew_by_the_lines_of_the_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = _trained("qwen2", tmp_path, target_modules=["q_proj"])
    torch.save(load_file(tmp_path / "theirs" / WEIGHTS), tmp_path / "theirs" / "adapter_model.bin")
    (tmp_path / "theirs" / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=r"adapter_model.bin: is a pickle") as raised:
        merge(tmp_path / "base", tmp_path / "theirs", tmp_path / "merged", report=_quiet)
    _run_lines(str(raised.value), tmp_path, monkeypatch)
    merge(tmp_path / "base", tmp_path / "NEW", tmp_path / "merged", report=_quiet)
    torch.testing.assert_close(_logits(tmp_path / "merged"), theirs, rtol=1e-5, atol=5e-5)


def test_every_setting_of_peft_is_known() -> None:
    """A field of another version of PEFT could change what adapters compute."""
    known = [*PLAIN, *READ, *WITHOUT_EFFECT]
    assert len(known) == len(set(known))
    assert {field.name for field in dataclasses.fields(peft.LoraConfig)} == set(known)


def test_a_rank_of_a_pattern_that_the_tensors_lack_is_refused(tmp_path: Path) -> None:
    """As ``r`` is; and a scale that is no number."""
    base, directory, _ = _written("qwen2", tmp_path)
    for fields, said in (
        ({"rank_pattern": {"q_proj": 8}}, r"4 of \d+ tensors, the first \S+q_proj\S+, have the rank 4, .* r=8"),
        ({"rank_pattern": {"q_proj": 4.5}}, "rank_pattern: q_proj=4.5: is no number over 0"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern: q_proj=None: is no number over 0"),
        ({"lora_alpha": 0}, "lora_alpha=0: is no number over 0"),
    ):
        wrong = _changed(directory, tmp_path / "wrong", **fields)
        with pytest.raises(CheckpointError, match=said):
            merge(base, wrong, tmp_path / "merged", report=_quiet)
        shutil.rmtree(wrong)
    with open_peft(_changed(directory, tmp_path / "same", rank_pattern=None, alpha_pattern=None), _table(base)):
        pass


def _table(base: Path) -> AdapterTable:
    return AdapterTable(Table(*model_of(read_config(base))), LORA)


@pytest.mark.parametrize(
    "architecture", [f"{name}ForConditionalGeneration" for name in ("Gemma3", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe")]
)
def test_adapters_of_a_text_part_are_peft_s_of_the_whole(architecture: str, tmp_path: Path) -> None:
    """PEFT adapts no layer of the tower, of which Gemma 3's have the same names, and computes as merged weights do."""
    whole = text_parts.write(architecture, tmp_path / "base")
    table = AdapterTable(Table(*model_of(read_config(tmp_path / "base"))), LORA)
    given = adapters.drawn(table)
    write_peft(given, table, tmp_path / "adapter", str(tmp_path / "base"))
    names = load_file(tmp_path / "adapter" / WEIGHTS).keys()
    assert all(name.startswith("base_model.model.model.language_model.layers.") for name in names)
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged", report=_quiet)
    adapted = peft.PeftModel.from_pretrained(whole, tmp_path / "adapter")
    trained = [name for name, _ in adapted.named_parameters() if "lora_" in name]
    assert trained and not [name for name in trained if "language_model" not in name]
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(adapted(TOKENS).logits, merged(TOKENS).logits, rtol=1e-4, atol=1e-4)
        adapted.save_pretrained(tmp_path / "again")
    with open_peft(tmp_path / "again", table) as read:
        assert all(torch.equal(read.read(name), tensor) for name, tensor in given.items())
