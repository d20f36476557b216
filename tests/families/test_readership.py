"""The recorded readers of config.json are those of the installed libraries, and no running model reads more."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from mcore_rl.families.readership import FILE, READERSHIP, SHARED
from mcore_rl.families.registry import BUILT_IN
from tests.house.source import ROOT
from tests.support.config_reads import transformers_reads
from tests.support.published import TINY

TOOL = ROOT / "tools" / "readership.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("readership_tool", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_record_is_that_of_the_installed_libraries(tool: ModuleType) -> None:
    assert set(READERSHIP) == set(BUILT_IN)
    assert FILE.read_text(encoding="utf-8") == tool.text(), "write it anew: python tools/readership.py"
    assert tool.main(["--check"]) == 0


@pytest.mark.parametrize("name", BUILT_IN)
def test_transformers_reads_nothing_that_is_not_recorded(name: str) -> None:
    """A model that is made and trained for a step, against the parsed sources.

    Without the fields that are said to be unread, since a configuration looks up whatever it was given; what code asks
    for is looked up all the same.
    """
    reads = transformers_reads({field: value for field, value in TINY[name].items() if field in READERSHIP[name]})
    assert {"hidden_size", "rms_norm_eps", "num_hidden_layers"} <= reads
    assert "attention_dropout" in reads or name == "ernie4_5"  # whose attention has 0 written in
    assert reads <= READERSHIP[name]


def test_every_way_to_look_up_a_name_is_seen(tool: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "transformers" / "modeling.py"
    file.parent.mkdir()
    file.write_text(
        "class Model:\n"
        "    names = ('listed', 'too')\n"
        "    def __init__(self, config, other):\n"
        "        self.a = config.attribute + self.config.nested + hf_text_config.text\n"
        "        self.b = getattr(other, 'by_getattr', None) or other.get('by_get') or other['by_key']\n"
        "        if 'by_in' in other or hasattr(other, 'by_hasattr'): pass\n"
        "        for name in ['in_a_loop']: getattr(config, name)\n"
        "        self.c = other.no_config + vllm_config.engines + scheduler_config.engines_too\n"
    )
    seen = tool.names_of(file)
    wanted = "listed too attribute nested text by_getattr by_get by_key by_in by_hasattr in_a_loop"
    assert set(wanted.split()) <= seen
    assert not {"no_config", "engines", "engines_too", "a", "b"} & seen
    file.write_text("class TinyConfig:\n    field: int = 1\n    def f(self): return self.own\n")
    assert {"field", "own"} <= tool.names_of(file)


def test_what_is_published_and_read_by_nobody_is_not_among_them() -> None:
    unread = "sliding_window_size is_llama_config rope_interleaved unsloth_fixed some_new_switch"
    assert not set(unread.split()) & frozenset().union(*READERSHIP.values())
    assert [name for name, names in READERSHIP.items() if "use_qk_norm" in names] == ["glm4_moe", "glm4_moe_lite"]
    assert "qkv_bias" in READERSHIP["qwen2_moe"] and "shared_expert_intermediate_size" in READERSHIP["qwen3_moe"]
    assert {"sliding_window", "rope_parameters", "dual_chunk_attention_config"} <= SHARED
