"""Makes the tools that ``rollout.agent`` names: built in, functions, and classes of a yaml file in verl's form."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator, SchemaError

from mcore_rl.agents.function_process import FunctionProcesses, FunctionTool, absolute, describe
from mcore_rl.agents.mcp_servers import McpServer, mcp_tools
from mcore_rl.agents.tools import TOOLS_KEY, ToolSchema, ToolSet
from mcore_rl.config.agent import AgentConfig
from mcore_rl.config.reward import CodeConfig
from mcore_rl.ground.errors import ConfigError, Violation, refuse_if_any

FILE_KEY = "rollout.agent.tool_config_path"
# The module whose ``make(config, code)`` makes a tool.
BUILT_IN = {
    "calculator": "mcore_rl.agents.toolbox.calculator",
    "python": "mcore_rl.agents.toolbox.interpreter",
    "calc_gsm8k_reward": "mcore_rl.agents.toolbox.gsm8k",
    "search": "mcore_rl.agents.toolbox.search",
}
METHODS = ("create", "execute", "calc_reward", "release")
YAML_FORM = "Write tools: [{class_name: MODULE.CLASS, config: {}, tool_schema: {type: function, function: {...}}}]"


def load_tools(
    config: AgentConfig, code: CodeConfig, processes: FunctionProcesses, servers: list[McpServer]
) -> ToolSet:
    """The tools of ``config``.

    code: the limits of the Python interpreter.  processes: run the functions.  servers: grows by the MCP servers that
    are started, for the caller to close.
    ConfigError: with every tool that cannot be made, or that has the name of another.
    """
    tools: dict[str, Any] = {}
    violations: list[Violation] = []
    named = list(_named(config, code, processes))
    for more in (_from_file(config), mcp_tools(config.mcp_config_path, servers, config.tool_timeout_s)):
        try:
            named += more
        except ConfigError as error:
            violations += error.violations
    for key, name, make in named:
        try:
            tool = make()
        except ConfigError as error:
            violations += error.violations
            continue
        except Exception as error:  # noqa: BLE001  whatever the user's class does
            violations.append(Violation(key, name, f"cannot be made: {type(error).__name__}: {error}", YAML_FORM))
            continue
        own = str(tool.tool_schema["function"]["name"])
        if own in tools:
            violations.append(Violation(key, name, f"there is another tool {own}", "Name each once"))
        tools[own] = tool
    refuse_if_any(violations)
    return ToolSet(tools)


def _named(config: AgentConfig, code: CodeConfig, processes: FunctionProcesses) -> Iterator[tuple[str, str, Any]]:
    """(key, name, what makes it) of each of ``tools``."""
    for name in config.tools:
        if name in BUILT_IN:
            tool = importlib.import_module(BUILT_IN[name])
            yield TOOLS_KEY, name, lambda tool=tool: tool.make(config, code)
        else:
            yield TOOLS_KEY, name, lambda place=name: _function(place, processes)


def _function(place: str, processes: FunctionProcesses) -> FunctionTool:
    if ":" not in place:
        remedy = f"Write one of {', '.join(BUILT_IN)}, or FILE.py:FUNCTION"
        raise ConfigError([Violation(TOOLS_KEY, place, "there is no such tool", remedy)])
    place = absolute(place)
    return FunctionTool(place, describe(place, TOOLS_KEY), processes)


def _from_file(config: AgentConfig) -> Iterator[tuple[str, str, Any]]:
    """(key, name, what makes it) of each tool of ``tool_config_path``."""
    for name, entry in listed_classes(config.tool_config_path, "tools", FILE_KEY, YAML_FORM):
        yield FILE_KEY, name, lambda name=name, entry=entry: _of_class(name, entry)


def _of_class(name: str, entry: Mapping[str, Any]) -> Any:
    schema = entry.get("tool_schema")
    if not isinstance(schema, dict) or "name" not in (schema.get("function") or {}):
        raise ConfigError([Violation(FILE_KEY, name, "has no tool_schema with function.name", YAML_FORM)])
    try:
        Draft202012Validator.check_schema(schema["function"].get("parameters") or {})
    except SchemaError as error:
        raise ConfigError([Violation(FILE_KEY, name, f"parameters: {error.message}", YAML_FORM)]) from error
    kind = imported_class(name, FILE_KEY)
    if missing := lacking(kind, METHODS):
        raise ConfigError([Violation(FILE_KEY, name, f"has no {', '.join(missing)}", f"Write {', '.join(METHODS)}")])
    tool = kind(config=dict(entry.get("config") or {}), tool_schema=ToolSchema(schema))
    tool.tool_schema = ToolSchema(schema)
    return tool


def listed_classes(path: str | None, name: str, key: str, form: str) -> list[tuple[str, Any]]:
    """(class_name, entry) of each entry of the list ``name`` in the yaml file at ``path``; [] if no file is named.

    key: that names the file.  form: of such files, for ConfigError: there is no such list.
    """
    if path is None:
        return []
    try:
        entries = yaml.safe_load(Path(os.path.expanduser(path)).read_text(encoding="utf-8"))[name]
        return [(str(entry["class_name"]), entry) for entry in entries]
    except (OSError, ValueError, yaml.YAMLError, TypeError, LookupError) as error:
        problem = f"is no list of {name.removesuffix('s')}s ({type(error).__name__}: {error})"
        raise ConfigError([Violation(key, path, problem, form)]) from error


def lacking(kind: Any, methods: Iterable[str]) -> list[str]:
    """The ``methods`` that a class lacks."""
    return [name for name in methods if not callable(inspect.getattr_static(kind, name, None))]


def imported_class(name: str, key: str) -> Any:
    """The class at ``MODULE.CLASS``.  key: that names it.  ConfigError: there is none."""
    module, _, kind = name.rpartition(".")
    try:
        return vars(importlib.import_module(module))[kind]
    except Exception as error:
        problem = f"cannot be imported: {type(error).__name__}: {error}"
        raise ConfigError([Violation(key, name, problem, "Name a class as MODULE.CLASS, installed here")]) from error
