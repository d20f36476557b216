"""The rule of pictures: a script that asks for some becomes a run that sees them, and never one of text."""

from __future__ import annotations

import re

from mcore_rl.from_verl.answer import Answer, Difference
from mcore_rl.from_verl.written import MODEL_PATHS, Verl

KEY, OTHERS = "data.image_key", ("data.video_key", "data.audio_key")
COLUMN = "images"  # verl's default, of fine-tuning too, whose yaml has no such key
FREEZE = "actor_rollout_ref.actor.freeze_vision_tower"
EXCLUDES = re.compile(r"\W*(?:model)?\W*(?:visual|vision)\W*", re.I)  # of a pattern that leaves the tower out
UNREAD = (
    "of this model pictures are not read: the vision towers that are read are those of Qwen2.5-VL, Qwen3-VL and "
    "Qwen3-VL-MoE. data.image_key stays in the yaml, where the run is refused"
)
ADAPTERS = "the tower has no adapters here, and stays as it is"
# Kind of tower -> fewest and most pixels of a picture, as qwen_vl_utils and the checkpoint's processor have them.
PIXELS = {
    "qwen2_5_vl": (56 * 56, 16384 * 28 * 28),
    "qwen3_vl": (256 * 256, 16384 * 32 * 32),
    "qwen3_vl_moe": (256 * 256, 16384 * 32 * 32),
}


def pictures(verl: Verl, answer: Answer) -> None:
    """The column of pictures, their sizes, and whether the tower learns."""
    asked = [key for key in (KEY, *OTHERS) if verl.written.get(key)]
    is_text = KEY in verl.written and not asked
    if is_text or not (asked or answer.model.sees):
        return
    answer.set(KEY, verl[KEY] or COLUMN, KEY)
    for key in asked:
        if key in OTHERS:
            answer.tell(Difference.absent, key, "pictures alone are read: rows with videos or sounds are refused")
    if answer.model.tower == "":
        for key in (KEY,) if KEY in verl.written else MODEL_PATHS:
            answer.tell(Difference.absent, key, UNREAD)
    if answer.model.tower in PIXELS:
        fewest, most = PIXELS[answer.model.tower]
        answer.set("data.image_min_pixels", fewest, "the processor's min_pixels")
        answer.set("data.image_max_pixels", most, "the processor's max_pixels")
    if verl[FREEZE]:
        answer.set("actor.vision", "frozen", FREEZE)
    for role, places in verl.places.items():
        rank = f"{places.model}.lora_rank"
        if role == "actor" and verl[rank] and not leaves_tower_out(verl[f"{places.model}.exclude_modules"]):
            answer.tell(Difference.changed, rank, ADAPTERS, f"actor.lora.rank={verl[rank]}")


def leaves_tower_out(excluded: object) -> bool:
    """Whether modules without adapters are the vision tower and nothing else."""
    names = excluded if isinstance(excluded, list) else [excluded]
    return bool(names) and all(isinstance(name, str) and EXCLUDES.fullmatch(name) for name in names)
