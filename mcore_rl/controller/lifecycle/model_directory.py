"""The directory that a program reads the policy's checkpoint from, with what is changed of its config.json."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from mcore_rl.config.trainer import PolicyModelConfig
from mcore_rl.controller.lifecycle.messages import note
from mcore_rl.families.config_changes import ConfigChanges
from mcore_rl.families.config_json import read_config
from mcore_rl.families.registry import unread_fields
from mcore_rl.families.text_part import text_part_of


def prepare_model(model: PolicyModelConfig, directory: Path, *, pictures: bool = False) -> None:
    """Make ``directory`` the view of ``model.path`` where config.json is changed, and note what is read in part.

    directory: that which every reader reads; ``model.path`` itself where nothing is changed.  pictures: whether a
    vision tower is read, too.

    Raises CheckpointError: no readable config.json, or the view cannot be written.  ConfigError: a change that nobody
    would read; a family or a field that is not supported.
    """
    source = Path(model.path)
    if model.is_changed:
        changes = ConfigChanges.of(model)
        _say(f"{source}: config.json is read with changes: {changes.describe(read_config(source))}")
        changes.view(source, directory)
    if not pictures and (part := text_part_of(read_config(directory))):
        rest = " and ".join(f"{name}*" for name in part.rest)
        trained = f"the text part, {part.text_architecture}, is trained and drawn from"
        _say(f"{source}: {part.architecture}: {trained}; {rest} are left as they are, and exported with it")
    if unread := unread_fields(read_config(directory)):
        said = "neither transformers nor vLLM reads these fields of config.json for this model, and they change nothing"
        _say(f"{source}: {said}: {', '.join(unread)}")


@cache  # once, though a run prepares again after every restart
def _say(text: str) -> None:
    note(text)
