"""The rule of pictures: a script that asks for some becomes a run that sees them, and never one of text."""

from __future__ import annotations

import re

from mcore_rl.from_verl.answer import Answer, Difference, Entry
from mcore_rl.from_verl.rows_run import STILLS
from mcore_rl.from_verl.written import MODEL_PATHS, Verl

KEY = "data.image_key"
OTHERS = ("data.video_key", "data.audio_key")
COLUMN = "images"  # verl's default, of fine-tuning too, whose yaml has no such key
FREEZE = "actor_rollout_ref.actor.freeze_vision_tower"
ROLLOUT = "actor_rollout_ref.rollout"
LIMIT = f"{ROLLOUT}.engine_kwargs.vllm.limit_mm_per_prompt.image"
SIZES = re.compile(r".*\.mm_processor_kwargs\.(?:min_pixels|max_pixels|size\..*)")
EXCLUDES = re.compile(r"\W*(?:model)?\W*(?:visual|vision)\W*", re.I)  # of a pattern that leaves the tower out
UNREAD = (
    "of this model pictures are not read: the vision towers that are read are those of Qwen2.5-VL, Qwen3-VL and "
    "Qwen3-VL-MoE. data.image_key stays in the yaml, where the run is refused"
)
UNSURE = (
    "nobody knows by its name whether this model sees pictures, and verl's yaml has this key of any: write "
    "data.image_key=images if so, or data.image_key: null into verl's yaml if it reads text"
)
GUESSED = (
    "asks for pictures, and nobody knows by its name whether this model sees any: the yaml has data.image_key. Write "
    "data.image_key into the script: the column, or null for text"
)
UNSIZED = "nobody knows this model's processor by its name: write {} as its preprocessor_config.json has them"
NO_ROOM = "the engine lets no picture in, by limit_mm_per_prompt.image=0: leave one of the two out"
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
    hints = [key for key in verl.written if hints_at_pictures(verl, key)]
    if text := why_text(verl, answer, asked):
        for key in (*asked, *hints):
            answer.dropped(key, text)
        return
    if not (asked or hints or answer.model.sees):
        if KEY in verl.defaulted and answer.model.sees is None:
            answer.entries.append(Entry(Difference.unknown, KEY, verl[KEY], text=UNSURE))
        return
    answer.set(KEY, verl[KEY] or COLUMN, KEY)
    for key in hints if not (asked or answer.model.sees) else ():
        answer.unknown(key, GUESSED)
    for key in asked:
        if key in OTHERS:
            answer.absent(key, STILLS)
        if verl.written.get(LIMIT) == 0:
            answer.absent(key, NO_ROOM)
    told_of = next((key for key in (KEY, *MODEL_PATHS, *asked, *hints) if key in verl.written), KEY)
    if answer.model.tower == "":
        answer.absent(told_of, UNREAD)
    elif answer.model.tower is None:
        sizes = [f"data.image_{name}_pixels" for name in ("min", "max")]
        if unsized := [size for size in sizes if size not in answer.settings]:
            answer.unknown(told_of, UNSIZED.format(" and ".join(unsized)))
    else:
        fewest, most = PIXELS[answer.model.tower]
        answer.set("data.image_min_pixels", fewest, "the processor's min_pixels")
        answer.set("data.image_max_pixels", most, "the processor's max_pixels")
    if verl[FREEZE]:
        answer.set("actor.vision", "frozen", FREEZE)
    for role, places in verl.places.items():
        rank = f"{places.model}.lora_rank"
        if role == "actor" and verl[rank] and not tower_names(verl[f"{places.model}.exclude_modules"]):
            answer.changed(rank, ADAPTERS, f"actor.lora.rank={verl[rank]}")


def hints_at_pictures(verl: Verl, key: str) -> bool:
    """Whether a written key other than that of the column means something for pictures alone."""
    return bool(verl.written[key]) and (key in (FREEZE, LIMIT, f"{ROLLOUT}.limit_images") or bool(SIZES.fullmatch(key)))


def why_text(verl: Verl, answer: Answer, asked: list[str]) -> str:
    """Why the run is one of text, whatever else was written; "": it may see pictures."""
    if answer.model.sees is False:
        return "the model reads text"
    if asked:
        return ""
    if KEY in verl.written:
        return f"{KEY} is null, and the run one of text"
    return "limit_mm_per_prompt.image=0 is a run of text" if verl.written.get(LIMIT) == 0 else ""


def tower_names(excluded: object) -> list[str]:
    """Those of modules without adapters, one or a list, that are the vision tower and nothing else."""
    names = excluded if isinstance(excluded, list) else [excluded]
    return [name for name in names if isinstance(name, str) and EXCLUDES.fullmatch(name)]
