"""What a user changes of a checkpoint's ``config.json``: fields with other values, and fields that are left out.

There is one changed ``config.json``, and everything reads it: the table of weights, Megatron, transformers, vLLM, the
planner, exports.  ``view`` writes it beside links to the checkpoint's other files, for readers of a directory.
Invariant: a change that nobody reads is refused, so that none is made in vain.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mcore_rl.config.trainer import PolicyModelConfig
from mcore_rl.families.config_json import CONFIG, read_config
from mcore_rl.families.family import Family
from mcore_rl.families.fields import Fields
from mcore_rl.families.registry import family_of, readers_of
from mcore_rl.families.text_part import text_config, with_text
from mcore_rl.ground.errors import CheckpointError, Violation, refuse_if_any
from mcore_rl.ground.json_text import read_json
from mcore_rl.tracking.atomic import replaced

# Fields that say which model and which weights there are.
IDENTITY = ("architectures", "model_type", "quantization_config")
OF_EVERY_ROTATION = ("rope_theta", "partial_rotary_factor")


@dataclass(frozen=True, kw_only=True)
class ConfigChanges:
    """Changes of a multimodal checkpoint's config.json are of the fields of its text part.

    overrides: field -> its value instead of the file's; one with fields of its own is ``merged`` with the file's.

    ignored: fields that are read as if the file lacked them.
    override_key, ignore_key: how the user writes both, for messages.
    """

    overrides: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    override_key: str = "model.config_overrides"
    ignore_key: str = "model.ignore_fields"

    @classmethod
    def of(cls, model: PolicyModelConfig) -> ConfigChanges:
        """What the configuration group ``model`` changes."""
        return cls(overrides=model.config_overrides, ignored=tuple(model.ignore_fields))

    def __bool__(self) -> bool:
        return bool(self.overrides or self.ignored)

    def apply(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """``config`` with the changes.

        Raises ConfigError with every change that nobody would read, and those that would make it another model.
        """
        if not self:
            return dict(config)
        family = family_of(config)
        text = text_config(config)
        overrides = {name: merged(text.get(name), value) for name, value in self.overrides.items()}
        changed = with_text(config, overrides, self.ignored)
        refuse_if_any([*self._wrong_ignored(text, family), *self._wrong_overrides(text, text_config(changed), family)])
        return changed

    def view(self, source: Path, target: Path) -> None:
        """Make ``target`` a directory of links to the files of ``source``, with the changed config.json.

        An earlier view there is replaced.  Raises ConfigError as ``apply``; CheckpointError: no readable config.json,
        or ``target`` cannot be written.
        """
        text = json.dumps(self.apply(read_config(source)), indent=2, ensure_ascii=False) + "\n"
        try:
            target.mkdir(parents=True, exist_ok=True)
            for path in target.iterdir():
                if path.is_symlink():
                    path.unlink()
            for path in source.resolve().iterdir():
                if path.name != CONFIG:
                    (target / path.name).symlink_to(path, target_is_directory=path.is_dir())
            with replaced(target / CONFIG) as new:
                new.write_text(text, encoding="utf-8")
        except OSError as error:
            problem = f"the changed config.json cannot be written there: {error.strerror}"
            raise CheckpointError(str(target), [f"{problem}. Mend that, or change config.json in a copy"]) from error

    def describe(self, config: Mapping[str, Any]) -> str:
        """One line on what is changed of ``config``, the file's content."""
        config = text_config(config)
        changed = [
            f"{name} {_json(old := config.get(name))} -> {_json(merged(old, value))}"
            for name, value in self.overrides.items()
        ]
        return ", ".join([*changed, *(f"{name} {_json(config.get(name))} is left out" for name in self.ignored)])

    def _wrong_ignored(self, config: Mapping[str, Any], family: Family) -> Iterator[Violation]:
        taken = _taken(config, family)
        for name in self.ignored:
            if name not in config:
                near = get_close_matches(name, config, n=3)
                problem = "config.json has no such field"
                remedy = f"Leave it out{_or(near)}"
            elif name in IDENTITY or name in taken:
                problem = "the family reads this field, and would read its default"
                remedy = f"Write the value that you mean: {self.override_key}.{name}=VALUE"
            elif name in self.overrides:
                problem = f"{self.override_key} changes it"
                remedy = "Write one of the two"
            else:
                continue
            yield Violation(self.ignore_key, name, problem, remedy)

    def _wrong_overrides(
        self, config: Mapping[str, Any], changed: Mapping[str, Any], family: Family
    ) -> Iterator[Violation]:
        taken = _taken(changed, family) | _taken(config, family)
        readers = taken | (readers_of(family) or frozenset())
        for name, value in self.overrides.items():
            if name in IDENTITY:
                problem = "says which weights these are"
                remedy = "Name the checkpoint of the model that you mean"
            elif name not in readers:
                near = get_close_matches(name, taken, n=3)
                problem = f"neither this package nor transformers' or vLLM's code of {family.model_type} reads it"
                remedy = f"Leave it out{_or(near)}"
            else:
                continue
            yield Violation(f"{self.override_key}.{name}", _json(value), problem, remedy)


def merged(old: Any, new: Any) -> Any:
    """``new``, with those fields of ``old`` that it does not name, where both are mappings.

    A rotation of another ``rope_type`` keeps only what rotations of every type have: transformers 5 writes rope_theta
    among their fields, and it would else become its default.
    """
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return new
    kind = new.get("rope_type", new.get("type"))
    other_kind = kind is not None and kind != old.get("rope_type", old.get("type"))
    kept = {name: value for name, value in old.items() if not other_kind or name in OF_EVERY_ROTATION}
    return kept | {name: merged(old.get(name), value) for name, value in new.items()}


def _taken(config: Mapping[str, Any], family: Family) -> frozenset[str]:
    fields = Fields(config)
    family.read(fields)
    return fields.taken


def _or(near: list[str]) -> str:
    return f", or write {' or '.join(near)}" if near else ""


def _json(value: Any) -> str:
    return json.dumps(value, default=str)


def add_change_options(parser: argparse._ActionsContainer) -> None:
    """Give a tool that reads a checkpoint the options ``--config-override`` and ``--ignore-field``."""
    override = "another value of a field of config.json, for every reader; may be given several times"
    parser.add_argument("--config-override", action="append", default=[], metavar="FIELD=VALUE", help=override)
    ignore = "a field of config.json that is read as if it were not there; may be given several times"
    parser.add_argument("--ignore-field", action="append", default=[], metavar="FIELD", help=ignore)


def changes_asked(arguments: argparse.Namespace) -> ConfigChanges:
    """What the options of ``add_change_options`` say: values in JSON, else texts.

    Raises ConfigError where one is not FIELD=VALUE.
    """
    overrides = dict[str, Any]()
    violations = list[Violation]()
    for written in arguments.config_override:
        name, sign, value = written.partition("=")
        if not (name and sign):
            problem = "is not FIELD=VALUE"
            remedy = "Write rope_theta=1e6, say"
            violations.append(Violation("--config-override", written, problem, remedy))
        try:
            overrides[name] = read_json(value)
        except ValueError:
            overrides[name] = value
    refuse_if_any(violations)
    return ConfigChanges(
        overrides=overrides,
        ignored=tuple(arguments.ignore_field),
        override_key="--config-override",
        ignore_key="--ignore-field",
    )


def changed_directory(source: Path, changes: ConfigChanges, stack: ExitStack) -> Path:
    """``source`` itself where nothing is changed, else a view of it that ``stack`` removes.  Raises as ``view``."""
    if not changes:
        return source
    target = Path(stack.enter_context(TemporaryDirectory(prefix=f"{source.name}-changed-")))
    changes.view(source, target)
    return target
