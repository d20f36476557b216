"""Records in each checkpoint what its run is, and checks on resume whether the run is still the same.

A resume with another model, other training data or other roles is refused.  Every other difference is allowed, and
shown to the user.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mcore_rl.checkpoints.manifest import sum_of
from mcore_rl.controller.lifecycle.messages import note
from mcore_rl.errors import CheckpointError, Violation, refuse_if_any
from mcore_rl.families.config_json import read_config
from mcore_rl.tracking.run_directory import plain
from mcore_rl.tracking.secrets import redact

RUN = "run.json"
ANEW = "Write what the checkpoint was made with, or begin another run with trainer.resume_mode=off"
# Keys of places only: the run directory, the checkpoint to resume from, the Ray cluster.
NOT_COMPARED = ("trainer.default_local_dir", "trainer.resume_mode", "trainer.resume_from_path", "ray_init.")
# Fields of config.json that affect neither weights nor results.
UNIMPORTANT = ("_name_or_path", "transformers_version", "use_cache", "torch_dtype", "dtype")


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What a run is.

    config: the composed configuration, without secrets.
    model: the content of its config.json.
    data: name, bytes and checksum of each training file.
    roles: the names of the trained roles.
    """

    config: dict[str, Any]
    model: dict[str, Any]
    data: list[list[Any]]
    roles: list[str]

    @classmethod
    def of(cls, config: Mapping[str, Any], roles: Sequence[str]) -> Identity:
        """The identity of the run of ``config``.  Reads every training file once."""
        values = json.loads(json.dumps(plain(config)))
        model = read_config(Path(values["model"]["path"]))
        sums = [(Path(name).name, sum_of(Path(name))) for name in values["data"]["train_files"]]
        data = [[name, file_sum.num_bytes, file_sum.checksum] for name, file_sum in sums]
        return cls(config=redact(values), model=model, data=data, roles=list(roles))

    @classmethod
    def read(cls, checkpoint: Path) -> Identity:
        """The identity of the run that wrote ``checkpoint``.  CheckpointError: it cannot be read."""
        try:
            return cls(**json.loads((checkpoint / RUN).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(
                str(checkpoint), [f"{RUN} cannot be read: {error}. Resume from another step"]
            ) from error

    def keep(self, directory: Path) -> None:
        """Writes the identity into ``directory``.  OSError: the disk is full, or fails."""
        (directory / RUN).write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    def check(self, checkpoint: Path) -> list[str]:
        """The differences from the run that wrote ``checkpoint``, one line each.

        ConfigError, with every violation: it is another run.
        """
        theirs = Identity.read(checkpoint)
        refuse_if_any(list(self._refused(theirs)))
        ours, before = _flat(self.config), _flat(theirs.config)
        return [
            f"{key}: {before.get(key)} when the checkpoint was made, now {ours.get(key)}"
            for key in sorted(ours.keys() | before.keys())
            if ours.get(key) != before.get(key) and not key.startswith(NOT_COMPARED)
        ]

    def _refused(self, theirs: Identity) -> Iterator[Violation]:
        names = self.model.keys() | theirs.model.keys()
        other = [
            f"{name} {theirs.model.get(name)} there, {self.model.get(name)} here"
            for name in sorted(names - set(UNIMPORTANT))
            if self.model.get(name) != theirs.model.get(name)
        ]
        if other:
            problem = f"is another model than the checkpoint's: {'; '.join(other)}"
            yield Violation("model.path", self.config["model"]["path"], problem, ANEW)
        if self.data and [each[1:] for each in self.data] != [each[1:] for each in theirs.data]:  # val_only needs none
            there, here = (
                ", ".join(f"{name} of {size:,} bytes" for name, size, _ in each.data) for each in (theirs, self)
            )
            problem = f"are other data than the checkpoint's, so that its place in them means nothing: {there} there"
            problem += f", {here} here"
            yield Violation("data.train_files", self.config["data"]["train_files"], problem, ANEW)
        if self.roles != theirs.roles:
            key = "algorithm.adv_estimator"
            estimator = self.config.get("algorithm", {}).get("adv_estimator")
            problem = f"trains {' and '.join(self.roles)}; the checkpoint has {' and '.join(theirs.roles)}"
            yield Violation(key, estimator, problem, ANEW)


def note_differences(identity: Identity, checkpoint: Path) -> None:
    """Shows how the settings differ from those of the run of ``checkpoint``.  Raises as ``Identity.check``."""
    if differences := identity.check(checkpoint):
        note(
            "\n  - ".join(
                [f"Resuming from {checkpoint} with other settings, so that results may differ:", *differences]
            )
        )


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = dict[str, Any]()
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
