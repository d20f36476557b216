"""Which of vLLM's files of our language models ask for torchvision: those that have a vision tower, too."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

from mcore_rl.families.registry import FAMILIES
from mcore_rl.rollout.vllm.torchvision_names import BESIDE_A_TOWER


def test_what_stands_beside_a_tower_is_what_vllm_says() -> None:
    """Of the architectures that are ours, those whose file registers a processor of pictures."""
    vllm = find_spec("vllm")
    assert vllm is not None and vllm.origin is not None
    folder = Path(vllm.origin).parent / "model_executor" / "models"
    modules: dict[str, str] = {}
    for node in ast.walk(ast.parse((folder / "registry.py").read_text(encoding="utf-8"))):
        for key, value in zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ():
            match key, value:
                case ast.Constant(value=str(name)), ast.Tuple(elts=[ast.Constant(value=str(module)), *_]):
                    modules[name] = module
    files = {
        name: folder / f"{modules[name]}.py"
        for family in FAMILIES.values()
        for name in family.architectures
        if name in modules
    }
    assert len(files) > 15
    seeing = {
        name: file.stem
        for name, file in files.items()
        if file.is_file() and "register_processor" in file.read_text(encoding="utf-8")
    }
    assert seeing == BESIDE_A_TOWER
