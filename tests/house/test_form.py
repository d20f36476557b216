"""The form of the code: names, and the few things that no module does.  What ruff can say is left to ruff."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.house.source import Rule, python_files, refuse

JUNK_DRAWERS = {"utils", "util", "misc", "helpers", "helper", "common", "manager", "base"}

# The environment is read where a process is described or started, and nowhere else: settings are configuration.
READS_ENVIRONMENT = (
    "mcore_rl/commands/from_verl.py",  # what the variables of a user's script say, as a shell would
    "mcore_rl/commands/programs.py",  # torch's own variable, before its import
    "mcore_rl/parallel/device.py",
    "mcore_rl/parallel/device_details.py",
    "mcore_rl/parallel/launch.py",
    "mcore_rl/parallel/meeting.py",  # sets the interface of collectives, which their libraries read there alone
    "mcore_rl/rollout/vllm/engine/environment.py",
    "mcore_rl/runtime/cluster.py",  # whether the user keeps Ray's files: Ray's own variable
    "mcore_rl/tracking/run_owner.py",  # which Slurm job it runs in: that is said nowhere else
    "mcore_rl/ground/secrets.py",
    "tools/upgrade_report.py",  # adds a folder to the path of the tests that it starts
)
ENVIRONMENT = ("environ", "environb", "getenv", "putenv", "unsetenv")
PATCHES_MODULES = (
    "mcore_rl/parallel/cpu.py",
    "mcore_rl/parallel/weight_gradient.py",  # the module that Megatron looks for under Apex's name
    "mcore_rl/parallel/plain_objects.py",  # torch's unpickler of what other ranks send, which has no setting
    "mcore_rl/runtime/scratch.py",  # tempfile.tempdir, which Python says to set so
    "mcore_rl/rollout/vllm/receiver/plain_experts.py",  # vLLM's choice of a kernel, in its own workers
    "mcore_rl/rollout/vllm/oracle.py",  # vLLM's groups, in a process of its own that runs nothing else
)


def junk_drawer(path: str, _: str) -> list[str]:
    parts = path.removesuffix(".py").split("/")
    return [f"{path}:1: {part} says nothing of what is in it. Name the idea" for part in parts if part in JUNK_DRAWERS]


def getattr_with_default(path: str, text: str) -> list[str]:
    if "getattr" not in text:
        return []  # without parsing it
    return [
        f"{path}:{node.lineno}: getattr with a default hides a misspelt or missing field. Declare it"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and _name(node.func) == "getattr" and len(node.args) + len(node.keywords) > 2
    ]


def shallow_json(path: str, text: str) -> list[str]:
    """Whoever expects broken JSON must expect JSON that nests too deep, which Python refuses with another error."""
    if "json.load" not in text:
        return []
    return [
        f"{path}:{node.lineno}: JSON that nests too deep is a RecursionError. Catch it beside ValueError"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Try)
        and any(_reads_json(each) for line in node.body for each in ast.walk(line))
        and (caught := {name for handler in node.handlers for name in _caught(handler)})
        & {"ValueError", "JSONDecodeError"}
        and not caught & {"RecursionError", "RuntimeError", "Exception", "BaseException"}
    ]


def _reads_json(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    return node.func.attr in ("load", "loads") and _name(node.func.value) == "json"


def _caught(handler: ast.ExceptHandler) -> list[str]:
    """The names of the errors that ``handler`` catches."""
    if handler.type is None:
        return ["BaseException"]
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return [each.attr if isinstance(each, ast.Attribute) else _name(each) for each in types]


def environment_use(path: str, text: str) -> list[str]:
    if path in READS_ENVIRONMENT or not any(word in text for word in ENVIRONMENT):
        return []
    return [
        f"{path}:{node.lineno}: the environment configures nothing here. Take a configuration field or an argument"
        for node in ast.walk(ast.parse(text))
        if (isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT)
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and {a.name for a in node.names} & {"environ", "getenv"}
        )
    ]


def patched_module(path: str, text: str) -> list[str]:
    if path in PATCHES_MODULES:
        return []
    tree = ast.parse(text)
    imported = set(_imported_names(tree))
    return [
        f"{path}:{line}: changes {name}, which is another module's. Only mcore_rl/parallel/cpu.py may"
        for line, name in _attribute_writes(tree)
        if name in imported
    ]


def _name(node: ast.expr) -> str:
    """The leftmost name of ``a.b.c``; empty where there is none."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _imported_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)


def _attribute_writes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, leftmost name) of every ``name.attribute = ...`` and ``setattr(name, ...)``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((node.lineno, _name(target)) for target in targets if isinstance(target, ast.Attribute))
        elif isinstance(node, ast.Call) and _name(node.func) == "setattr":
            yield node.lineno, _name(node.args[0])


PACKAGE = ("mcore_rl",)
CODE = ("mcore_rl", "tools", "benchmarks", "launch")
EVERYTHING = (*CODE, "tests")


@pytest.mark.parametrize(
    ("rule", "folders"),
    [
        (junk_drawer, EVERYTHING),
        (getattr_with_default, CODE),
        (environment_use, CODE),
        (patched_module, PACKAGE),
        (shallow_json, PACKAGE),
    ],
)
def test_the_house_keeps_the_rule(rule: Rule, folders: tuple[str, ...]) -> None:
    refuse(rule, python_files(*folders))


@pytest.mark.parametrize(
    ("rule", "path", "bad"),
    [
        (junk_drawer, "mcore_rl/weights/utils.py", ""),
        (junk_drawer, "mcore_rl/common/names.py", ""),
        (getattr_with_default, "mcore_rl/x.py", "y = getattr(cfg, 'lr', 1e-6)"),
        (environment_use, "mcore_rl/x.py", "import os\ny = os.environ['DEBUG']"),
        (environment_use, "mcore_rl/x.py", "import os\ny = os.getenv('DEBUG')"),
        (environment_use, "mcore_rl/x.py", "from os import environ"),
        (patched_module, "mcore_rl/x.py", "import torch\ntorch.Tensor.cpu = None"),
        (shallow_json, "mcore_rl/x.py", "try:\n    y = f(json.loads(x))\nexcept (OSError, ValueError):\n    pass"),
        (shallow_json, "mcore_rl/x.py", "try:\n    y = json.load(x)\nexcept json.JSONDecodeError:\n    pass"),
        (patched_module, "mcore_rl/x.py", "from megatron.core import parallel_state as mpu\nsetattr(mpu, 'x', 1)"),
    ],
)
def test_the_rule_refuses(rule: Rule, path: str, bad: str) -> None:
    assert len(rule(path, bad)) == 1


@pytest.mark.parametrize(
    ("rule", "path", "good"),
    [
        (junk_drawer, "mcore_rl/weights/names.py", ""),
        (getattr_with_default, "mcore_rl/x.py", "y = getattr(cfg, name)"),
        (environment_use, "mcore_rl/parallel/device.py", "import os\ny = os.environ['RANK']"),
        (environment_use, "mcore_rl/x.py", "def f(environ): return environ['RANK']"),
        (patched_module, "mcore_rl/x.py", "import torch\nx = torch.nn.Linear(1, 1)\nx.weight.tag = 1\nself.y = torch"),
        (patched_module, "mcore_rl/parallel/cpu.py", "import torch\ntorch.Tensor.cpu = None"),
        (shallow_json, "mcore_rl/x.py", "try:\n    y = json.loads(x)\nexcept (RecursionError, ValueError):\n    pass"),
        (shallow_json, "mcore_rl/x.py", "y = json.loads(x)"),
    ],
)
def test_the_rule_allows(rule: Rule, path: str, good: str) -> None:
    assert rule(path, good) == []
