"""What a setting may be, declared beside its field, and the one check of it.

    lr: Annotated[float, Interval("[0, 1]")] = 1e-6
    train_batch_size: PositiveInt = 1024
    train_files: list[InputFile] = field(default_factory=list)

``check`` gives all violations of a configuration at once: first those of single settings, then those between settings,
as far as the settings that a rule reads are sound.  Only ``file_violations`` looks at files.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cache, cached_property
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from mcore_rl.config.files import input_problem, output_problem
from mcore_rl.config.names import field_of, key_of, value_at
from mcore_rl.ground.errors import Violation
from mcore_rl.ground.secrets import has_url_password, without_url_passwords
from mcore_rl.hub.names import DATASET, hub_name

T = TypeVar("T")
LARGEST_INT, LARGEST_FLOAT = 2**31 - 1, 1e12  # where a range ends at inf
LONGEST_TEXT = 4096


@dataclass(frozen=True)
class Interval:
    """Numbers of an interval, as mathematics writes it: ``(0, 1]`` is 0 < x <= 1.

    ``inf`` is ``LARGEST_INT`` or ``LARGEST_FLOAT``; nothing is infinite.  remedy: what to write instead.
    """

    text: str
    remedy: str = ""
    least: float = field(init=False)
    most: float = field(init=False)

    def __post_init__(self) -> None:
        least, most = (float(edge) for edge in self.text[1:-1].split(","))
        object.__setattr__(self, "least", least)
        object.__setattr__(self, "most", most)

    def problem(self, value: float) -> str | None:
        """What is wrong with ``value``; None if nothing is."""
        if not math.isfinite(value):
            return "must be a finite number"
        low = value <= self.least if self.text[0] == "(" else value < self.least
        high = value >= self.most if self.text[-1] == ")" else value > self.most
        largest = LARGEST_INT if isinstance(value, int) else LARGEST_FLOAT
        if (low or high) and self.most <= 1:
            return f"must lie in {self.text}"
        if low and self.text[0] == "[" and self.least == 0:
            return "must not be negative"
        if low and (self.text.startswith("(0") or (self.least == 1 and isinstance(value, int))):
            return "must be positive"
        if low:
            return f"must {'exceed' if self.text[0] == '(' else 'be at least'} {self.least:g}"
        if high:
            return f"must be at most {self.most:g}"
        return f"must not exceed {largest:g} either way" if math.isinf(self.most) and abs(value) > largest else None

    def advice(self, value: float) -> str:
        """What to write instead of ``value``."""
        if self.remedy:
            return self.remedy
        if math.isfinite(value) and value > self.least and math.isfinite(self.most):
            return f"Write {self.most:g} or less"
        if math.isfinite(value) and value > self.least:
            return "Write a smaller number"
        return f"Write more than {self.least:g}" if self.text[0] == "(" else f"Write {max(self.least, -1e12):g} or more"


@dataclass(frozen=True)
class PathKind:
    """A path.  kind: ``file`` or ``directory``.  written: whether the program writes it; else it must be there.

    hub: the kind of repository whose Hub id may stand there instead, ``model`` or ``dataset``; of the latter a folder
    may too.  part: what is needed of a model, by the name in ``hub.selection.ModelPart``.  split: that is meant.
    """

    kind: str
    written: bool = False
    hub: str = ""
    part: str = "weights"
    split: str = ""


@dataclass(frozen=True)
class FreeText:
    """A text that may have several lines."""


PositiveInt = Annotated[int, Interval("[1, inf)")]
NonNegativeInt = Annotated[int, Interval("[0, inf)")]
PositiveFloat = Annotated[float, Interval("(0, inf)")]
NonNegativeFloat = Annotated[float, Interval("[0, inf)")]
Share = Annotated[float, Interval("[0, 1]")]
PositiveShare = Annotated[float, Interval("(0, 1]")]
Seconds = Annotated[float, Interval("[0.001, 31536000]")]  # a millisecond to a year
SecondsOrZero = Annotated[float, Interval("[0, 31536000]")]
Seed = Annotated[int, Interval("[0, 4294967295]")]  # what NumPy takes
Ranks = Annotated[int, Interval("[1, 131072]")]  # no cluster has more
Beta = Annotated[float, Interval("[0, 1)", "Write 0.9, say")]
Bytes = Annotated[int, Interval("[1, 1e15]")]
InputFile = Annotated[str, PathKind("file")]
InputDirectory = Annotated[str, PathKind("directory")]
InputModel = Annotated[str, PathKind("directory", hub="model")]
InputTokenizer = Annotated[str, PathKind("directory", hub="model", part="tokenizer")]
TrainData = Annotated[str, PathKind("file", hub="dataset", split="train")]
ValidationData = Annotated[str, PathKind("file", hub="dataset", split="val")]
AnyData = Annotated[str, PathKind("file", hub="dataset")]
OutputFile = Annotated[str, PathKind("file", written=True)]
OutputDirectory = Annotated[str, PathKind("directory", written=True)]
Lines = Annotated[str, FreeText()]


@dataclass(frozen=True)
class Setting:
    """A leaf of a schema.

    key: dotted.  kind: the type of its value or, if it is a list, of each.  marks: of its annotation.
    listed, optional: whether it is a list, or may be None.  default: its value, or what makes it.
    mapped: whether it is a mapping of names to such values, whose type has marks.
    """

    key: str
    kind: Any
    marks: tuple[Any, ...]
    listed: bool
    optional: bool
    default: Any
    mapped: bool = False

    def mark(self, kind: type[T]) -> T | None:
        """Its mark of that type."""
        return next((each for each in self.marks if isinstance(each, kind)), None)

    @cached_property
    def range(self) -> Interval | None:
        """The numbers that it may be; None if it is no number."""
        return (self.mark(Interval) or ANY) if self.kind in (int, float) else None


ANY = Interval("(-inf, inf)")


@cache
def settings(schema: type[Any], prefix: str = "") -> tuple[Setting, ...]:
    """Every leaf of a schema, in the order of its fields; groups are its fields that are dataclasses."""
    return tuple(_leaves(schema, lambda name, hint: settings(hint, f"{prefix}{key_of(name)}."), prefix))


def settings_of(config: Any, prefix: str = "") -> tuple[Setting, ...]:
    """Every leaf of a configuration: of a group that is of a subclass of its declared one, the subclass's too."""
    return tuple(
        _leaves(type(config), lambda name, _: settings_of(getattr(config, name), f"{prefix}{key_of(name)}."), prefix)
    )


def _leaves(schema: type[Any], of_group: Callable[[str, Any], Iterable[Setting]], prefix: str) -> Iterator[Setting]:
    for name, leaf, hint in _fields(schema):  # type: ignore[arg-type]  # a class is hashable
        if leaf is None:
            yield from of_group(name, hint)
        else:
            yield replace(leaf, key=f"{prefix}{leaf.key}") if prefix else leaf


@cache
def _fields(schema: type[Any]) -> tuple[tuple[str, Setting | None, Any], ...]:
    """(name, the setting of a leaf or None of a group, type) of each field."""
    hints = get_type_hints(schema, include_extras=True)
    made = list[tuple[str, Setting | None, Any]]()
    for each in fields(schema):
        if each.metadata.get("omegaconf_ignore"):
            continue
        hint = hints[each.name]
        default = each.default_factory() if each.default_factory is not MISSING else each.default
        leaf = None if is_dataclass(hint) else setting_of(key_of(each.name), hint, default)
        made.append((each.name, leaf, hint))
    return tuple(made)


def setting_of(key: str, hint: Any, default: Any) -> Setting:
    """The setting of a field with the type ``hint``."""
    marks = list[Any]()
    listed = False
    optional = False
    mapped = False
    while True:
        origin = get_origin(hint)
        if origin is Annotated:
            hint, *more = get_args(hint)
            marks += more
        elif origin in (Union, UnionType):
            (hint,) = (each for each in get_args(hint) if each is not NoneType)
            optional = True
        elif origin in (list, tuple):
            hint = get_args(hint)[0]
            listed = True
        elif origin is dict and get_origin(get_args(hint)[1]) is Annotated:
            hint = get_args(hint)[1]
            mapped = True
        else:
            return Setting(key, hint, tuple(marks), listed, optional, default, mapped)


def bound_violations(config: Any, prefix: str = "") -> list[Violation]:
    """Every setting of ``config`` that by itself is out of bounds.  prefix: of the keys, with its dot."""
    violations = list[Violation]()
    for each, key, value in _values(config, prefix):
        if problem := value_problem(each, value):
            shown = without_url_passwords(value) if isinstance(value, str) else value
            violations.append(Violation(key, shown, *problem))
    return violations


def file_violations(config: Any, prefix: str = "") -> list[Violation]:
    """Every path that is to be read and cannot be, and every path that is to be written and cannot be.

    Of a Hub id nothing is said, and nothing of a folder of data: ``hub_files`` does.
    """
    violations = list[Violation]()
    for each, key, value in _values(config, prefix):
        place = each.mark(PathKind)
        if place is None or not value or value_problem(each, value) or is_name(value, place):
            continue
        if problem := (output_problem if place.written else input_problem)(value, place.kind):
            violations.append(Violation(key, value, *problem))
    return violations


def is_name(value: str, place: PathKind) -> bool:
    """Whether ``value`` stands for files that ``hub_files`` finds."""
    if not place.hub:
        return False
    folder = place.hub == DATASET and os.path.isdir(os.path.expanduser(value))
    return folder or hub_name(value, place.hub) is not None


def _values(config: Any, prefix: str) -> Iterator[tuple[Setting, str, Any]]:
    """(setting, key, value) of each leaf; of each item of a list or mapping, whose key ends in its number or name."""
    for each in settings_of(config):
        value = value_at(config, each.key)
        key = f"{prefix}{each.key}"
        if isinstance(value, Unsound) or (value is None and each.optional):
            continue
        if each.listed and isinstance(value, (list, tuple)):
            yield from ((each, f"{key}[{number}]", item) for number, item in enumerate(value))
        elif each.mapped and isinstance(value, dict):
            yield from ((each, f"{key}[{name}]", item) for name, item in value.items())
        else:
            yield each, key, value


def value_problem(each: Setting, value: Any) -> tuple[str, str] | None:
    """(what is wrong, what to write instead)."""
    if each.range is not None:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return "must be a number", "Write one"
        problem = each.range.problem(value)
        return None if problem is None else (problem, each.range.advice(value))
    if isinstance(value, str) and has_url_password(value):
        remedy = "Hand it over in a variable of the environment: rollout.agent.program.env, custom_reward_function.env"
        return "has a user or a password in a URL, which would be written into files", remedy
    return _text_problem(each, value) if each.kind is str else None


def _text_problem(each: Setting, value: Any) -> tuple[str, str] | None:
    if not isinstance(value, str):
        return "must be a text", "Write one"
    place = each.mark(PathKind)
    if place is not None and place.written and place.kind == "directory" and not value.strip():
        return "names no directory", "Write the directory of the run, such as runs/first"
    if not value and (each.listed or each.mapped or each.default != ""):
        return "is empty", "Leave it out, or write a text"
    free = each.mark(FreeText) is not None
    if (
        any(not letter.isprintable() and letter not in "\u00a0\u3000" for letter in value) and not free
    ) or "\0" in value:
        return "holds a control character, such as a line break", "Write it in one line"
    if len(value) > LONGEST_TEXT and not free:
        return f"has {len(value):,} characters, and at most {LONGEST_TEXT:,} are read", "Write a shorter one"
    return None


class UnsoundReadError(Exception):
    """A rule reads a setting that is out of bounds."""


class Unsound:
    """Stands for a value that is out of bounds: a rule that reads it ends there, and says nothing about it."""

    def _read(self, *_: object) -> Any:
        raise UnsoundReadError

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __bool__ = __len__ = __iter__ = _read
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = _read
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __format__ = __str__ = __repr__ = __int__ = __float__ = _read
    __index__ = __contains__ = __getitem__ = __fspath__ = __getattr__ = _read
    __slots__: ClassVar[tuple[str, ...]] = ()


CrossCheck = Callable[[T], Iterable[Violation]]


def check(
    config: T, rules: Iterable[CrossCheck[T]] = (), prefix: str = "", beside: Iterable[Violation] = ()
) -> list[Violation]:
    """Every violation of ``config``: of its bounds, then of ``rules``, as far as what a rule reads is within bounds.

    prefix: of the keys of ``config``, with its dot.  beside: further violations of single settings.
    """
    violations = [*beside, *bound_violations(config, prefix)]
    sound = _without(config, {each.key.removeprefix(prefix).partition("[")[0] for each in violations})
    for rule in rules:
        try:
            for each in rule(sound):
                if not isinstance(each.value, Unsound):
                    violations.append(each)
        except UnsoundReadError:
            continue
    return violations


def _without(config: T, keys: Iterable[str]) -> T:
    """A copy of ``config`` with ``Unsound`` at ``keys``."""
    return changed(config, {key: Unsound() for key in keys})


def changed(config: T, values: Mapping[str, Any]) -> T:
    """A copy of ``config`` with ``values``, by dotted key; those of other schemas are left out."""
    copied: Any = copy.copy(config)
    for key, value in values.items():
        *groups, name = field_of(key).split(".")
        group = copied
        for each in groups:
            setattr(group, each, copy.copy(getattr(group, each)))
            group = getattr(group, each)
        if hasattr(group, name):
            setattr(group, name, value)
    return copied  # type: ignore[no-any-return]
