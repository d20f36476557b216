"""The tables of ``rollout.engine`` against vLLM's dataclass, which is read and not imported; what is said of others."""

from __future__ import annotations

import ast
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.cli import main
from mcore_rl.config.compose import as_dict, compose
from mcore_rl.config.reward_model import reward_model_violations
from mcore_rl.config.run import RunConfig
from mcore_rl.config.vllm_fields import ALLOWED, OURS_ON_CPU, REFUSED, TAKEN, VLLM_FIELDS


def annotations() -> dict[str, str]:
    """Field of vLLM's engine arguments -> its annotation, with the meaning of names that are unions or literals."""
    spec = find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    package = Path(spec.submodule_search_locations[0])
    tree = ast.parse((package / "engine" / "arg_utils.py").read_text())
    return {
        field.target.id: ast.unparse(field.annotation)
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


THEIRS = annotations()


def test_every_field_of_vllm_has_one_place() -> None:
    named = Counter([*ALLOWED, *(name for table in (TAKEN, REFUSED) for names in table.values() for name in names)])
    assert not [name for name, count in named.items() if count > 1]
    assert named.keys() - THEIRS.keys() == set(), "vLLM has no such field"
    assert THEIRS.keys() - named.keys() == set(), "a field of vLLM has no place in the tables"
    assert len(THEIRS) > 200


@pytest.mark.parametrize("name", ALLOWED)
def test_types_are_those_of_vllm_s_annotations(name: str) -> None:
    hint = THEIRS[name].removesuffix(" | None").partition("[")[0]
    expected = {"bool": bool, "int": int, "list": list, "Literal": str}.get(hint)
    if expected is None and hint.endswith("Config"):
        expected = dict
    if expected is None:  # an enum or a literal with a name, of texts
        expected = int if hint == "OptimizationLevel" else str
    assert ALLOWED[name] is expected


def said(fields: dict[str, Any]) -> list[str]:
    return [str(each) for each in VLLM_FIELDS.violations(fields, "rollout.engine")]


def test_each_kind_of_mistake_is_said_with_its_remedy() -> None:
    wrong = {
        "tensor_parallel_size": 2,
        "max_model_len": 4096,
        "load_format": "auto",
        "model": "other",
        "speculative_config": {"method": "ngram"},
        "disable_custom_all_reducee": True,
        "block_size": "64",
        "async_scheduling": 1,
        "compilation_config": 3,
    }
    assert said(wrong) == [
        "rollout.engine.tensor_parallel_size=2: rollout.tp sets it. Leave it out, and write rollout.tp",
        "rollout.engine.max_model_len=4096: rollout.max_response_length sets it. Leave it out, and write "
        "rollout.max_response_length",
        "rollout.engine.load_format=auto: it changes how weights are loaded or held, and updates write them as the "
        "checkpoint has them. Leave it out",
        "rollout.engine.model=other: model.path sets it. Leave it out, and write model.path",
        "rollout.engine.speculative_config={'method': 'ngram'}: it makes log-probs other than those of the "
        "distribution that tokens are drawn from. Leave it out",
        "rollout.engine.disable_custom_all_reducee=True: vLLM 0.32's AsyncEngineArgs has no such field. Write "
        "disable_custom_all_reduce, perhaps",
        "rollout.engine.block_size=64: must be a whole number. Write a whole number",
        "rollout.engine.async_scheduling=1: must be true or false. Write true or false",
        "rollout.engine.compilation_config=3: must be keys and values, {a: b}. Write keys and values, {a: b}",
    ]
    assert said({"block_size": 64, "disable_custom_all_reduce": True, "cudagraph_capture_sizes": [1, 8]}) == []
    assert set(OURS_ON_CPU) <= ALLOWED.keys()


@pytest.mark.parametrize(
    "name", ["tensor_parallel_size", "seed", "dtype", "max_model_len", "load_format", "worker_extension_cls"]
)
def test_what_ours_is_cannot_be_passed(name: str) -> None:
    assert len(said({name: "x"})) == 1 and "no such field" not in said({name: "x"})[0]


def test_keys_of_ours_that_are_named_exist() -> None:
    """What the remedy tells the user to write."""
    run = as_dict(RunConfig())
    for key in TAKEN:
        value: Any = run if key.startswith(".") else run["rollout"]
        for part in key.removeprefix(".").split("."):
            assert part in value, key
            value = value[part]


def test_the_command_line_passes_them_on_with_their_types(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["rollout.engine={block_size: 64, async_scheduling: false}", "rollout.engine.all2all_backend=pplx"]
    run = compose(RunConfig, "train", words)
    expected = {"block_size": 64, "async_scheduling": False, "all2all_backend": "pplx"}
    assert run.rollout.engine == expected == as_dict(run)["rollout"]["engine"], "and so in the identity of the run"
    assert main(["train", "rollout.engine.seeds=1", "rollout.engine.seed=1", "rollout.engine.dtypes=x"]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "rollout.engine.seed=1: rollout.seed sets it. Leave it out, and write rollout.seed" in shown
    assert "rollout.engine.seeds=1: vLLM 0.32's AsyncEngineArgs has no such field. Write seed, perhaps" in shown


def test_a_reward_model_s_engine_has_them_too() -> None:
    judge = RunConfig().reward_model
    judge.enable, judge.model.path, judge.engine = True, "judge", {"dtype": "half"}
    assert [each.key for each in reward_model_violations(judge)] == ["reward_model.engine.dtype"]
