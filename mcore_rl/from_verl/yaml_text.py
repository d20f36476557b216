"""Writes settings as the text of a yaml file, and values as on a command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mcore_rl.from_verl.answer import TranslatedSetting

DOCUMENT_END = "...\n"  # after a value alone, as yaml writes it


def shown(value: Any) -> str:
    """A value as it is written on a command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(shown, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {shown(each)}' for name, each in value.items())}}}"
    return "null" if value is None else str(value)


def yaml_of(program: str, algorithm: str, settings: Mapping[str, TranslatedSetting], head: str) -> str:
    """The yaml file of a run of ``program``.  algorithm: its choice; "": none.  head: the first comment."""
    import yaml

    lines = [f"# {line}".rstrip() for line in head.splitlines()]
    lines += ["defaults:", f"  - {program}"]
    lines += [f"  - override algorithm: {algorithm}"] if algorithm else []
    lines += ["  - _self_"]
    tree: dict[str, Any] = {}
    for key, setting in settings.items():
        *groups, name = key.split(".")
        place = tree
        for group in groups:
            place = place.setdefault(group, {})
        place[name] = setting

    def written(values: Mapping[str, Any], depth: int) -> Iterator[str]:
        for name, each in values.items():
            indent = "  " * depth
            if not isinstance(each, TranslatedSetting):
                yield f"{indent}{name}:"
                yield from written(each, depth + 1)
                continue
            text = yaml.safe_dump(each.value, default_flow_style=True, width=10**6, sort_keys=False)
            mark = "" if each.written else "  # verl's default"
            yield f"{indent}{name}: {text.removesuffix(DOCUMENT_END).strip()}{mark}"

    return "\n".join([*lines, "", *written(tree, 0)]) + "\n"
