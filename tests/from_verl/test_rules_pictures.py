"""A script that asks for pictures becomes a run that sees them, and what it lacks is named: never a run of text."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mcore_rl.cli import main
from mcore_rl.families.towers import PICTURES
from mcore_rl.from_verl.answer import Difference, ModelFacts
from mcore_rl.from_verl.models import model_facts
from mcore_rl.from_verl.rules_pictures import PIXELS, hints_at_pictures, tower_names
from mcore_rl.from_verl.translate import Translation, translate
from mcore_rl.from_verl.written import Launch, of_launch, of_tree
from tests.from_verl.test_translate import A, R, at, listed, translated

MODEL = "actor_rollout_ref.model"
QWEN2_5, QWEN3 = "Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen3-VL-8B-Instruct"
VLLM = f"+{R}.engine_kwargs.vllm"


def seen(*words: str, path: str = QWEN2_5) -> Translation:
    return translated(f"{MODEL}.path={path}", *words, model=model_facts(path))


# Model -> pixels as qwen_vl_utils 0.0.14 (MIN_PIXELS, MAX_PIXELS) and the checkpoint's preprocessor_config.json say.
SIZES = {QWEN2_5: (3136, 12_845_056), QWEN3: (65_536, 16_777_216)}


@pytest.mark.parametrize("path", SIZES)
@pytest.mark.parametrize("words", [(), ("data.image_key=pictures",)])
def test_a_model_of_pictures_sees_them(path: str, words: tuple[str, ...]) -> None:
    """Also where no key asks for it: verl's default is a column of that name."""
    translation = seen(*words, path=path)
    assert translation.is_whole
    data = translation.run.data
    assert data.image_key == (words[0].partition("=")[2] if words else "images")
    assert (data.image_min_pixels, data.image_max_pixels) == SIZES[path]
    assert translation.run.actor.trains_tower and translation.run.actor.vision is None


ARRIVES = {
    f"{A}.freeze_vision_tower=True": ("actor.vision", "frozen"),
    f"+{R}.limit_images=5": ("data.max_images", 5),
    f"{VLLM}.limit_mm_per_prompt.image=3": ("data.max_images", 3),
    f"{VLLM}.limit_mm_per_prompt={{image:2,video:0}}": ("data.max_images", 2),
    "+data.mm_processor_kwargs.max_pixels=602112": ("data.image_max_pixels", 602_112),
    f"{VLLM}.mm_processor_kwargs.min_pixels=6272": ("data.image_min_pixels", 6272),
    "+data.mm_processor_kwargs.size.longest_edge=700000": ("data.image_max_pixels", 700_000),
}


@pytest.mark.parametrize("word", ARRIVES)
def test_keys_of_pictures_arrive(word: str) -> None:
    translation = seen(word)
    key, value = ARRIVES[word]
    assert at(translation.run, key) == value and translation.is_whole


NOTHING = [
    f"{VLLM}.mm_processor_cache_gb=0", f"{VLLM}.disable_mm_preprocessor_cache=True", "data.image_patch_size=16",
    "data.return_multi_modal_inputs=False", f"{A}.freeze_vision_tower=False", f"{VLLM}.limit_mm_per_prompt.image=0",
    f"{MODEL}.lora.freeze_vision_model=True", f"{MODEL}.lora.freeze_language_model=True",
]  # fmt: skip


def test_what_needs_nothing_is_said() -> None:
    translation = seen(*NOTHING)
    kinds = {word: listed(translation, word.partition("=")[0].lstrip("+")) for word in NOTHING}
    assert kinds == dict.fromkeys(NOTHING, Difference.dropped) and translation.is_whole


ABSENT = [
    "data.video_key=clips", "data.audio_key=sounds", "+data.mm_processor_kwargs.do_pan_and_scan=True",
    f"{VLLM}.limit_mm_per_prompt.video=1", f"{MODEL}.lora.freeze_vision_model=False",
    f"{MODEL}.lora.freeze_language_model=False",
]  # fmt: skip


def test_what_is_not_here_is_named() -> None:
    translation = seen(*ABSENT)
    kinds = {word: listed(translation, word.partition("=")[0].lstrip("+")) for word in ABSENT}
    assert kinds == dict.fromkeys(ABSENT, Difference.absent) and not translation.is_whole
    assert translation.run.sees_pictures


@pytest.mark.parametrize("path", ["openbmb/MiniCPM-o-2_6", "zai-org/GLM-4.1V-9B-Thinking", "Qwen/Qwen3.5-27B"])
def test_another_tower_is_named_and_no_run_of_text_comes_of_it(path: str) -> None:
    translation = seen("data.image_key=images", path=path)
    assert listed(translation, "data.image_key") is Difference.absent and not translation.is_whole
    assert translation.settings["data.image_key"].value == "images"


def test_videos_alone_are_no_run_of_text() -> None:
    translation = seen("data.video_key=videos", path="/models/mine")
    assert listed(translation, "data.video_key") is Difference.absent
    assert translation.settings["data.image_key"].value == "images"


@pytest.mark.parametrize(
    ("path", "words"), [("Qwen/Qwen3-8B", ()), ("Qwen/Qwen3.5-27B", ()), (QWEN2_5, ("data.image_key=null",))]
)
def test_text_stays_text(path: str, words: tuple[str, ...]) -> None:
    translation = seen(*words, f"{A}.freeze_vision_tower=False", path=path)
    assert not any("image" in key or "vision" in key for key in translation.settings) and translation.is_whole


def test_adapters_are_the_language_models() -> None:
    """verl's PEFT gives the tower some too, unless it is excluded."""
    everywhere = seen(f"{MODEL}.lora_rank=8")
    assert listed(everywhere, f"{MODEL}.lora_rank") is Difference.changed
    apart = seen(f"{MODEL}.lora_rank=8", f"{MODEL}.exclude_modules='.*visual.*'")
    assert listed(apart, f"{MODEL}.lora_rank") is None and apart.is_whole
    assert listed(apart, f"{MODEL}.exclude_modules") is Difference.dropped
    assert apart.run.actor.lora.exclude_modules == [] and not apart.run.actor.trains_tower
    other = seen(f"{MODEL}.lora_rank=8", f"{MODEL}.exclude_modules='.*o_proj'")
    assert listed(other, f"{MODEL}.exclude_modules") is Difference.absent


@pytest.mark.parametrize("excluded", [".*visual.*", "visual", r"^model\.visual\..*"])
def test_what_leaves_the_tower_out(excluded: str) -> None:
    assert tower_names(excluded) == tower_names([excluded, "o_proj"]) == [excluded]
    assert tower_names(None) == tower_names([]) == tower_names(["o_proj", "visual_proj"]) == []


def test_a_layer_beside_the_tower_stays_excluded() -> None:
    """No layer here is called ``visual``, so that such a yaml could not start."""
    translation = seen(f"{MODEL}.lora_rank=8", f"{MODEL}.exclude_modules=[visual,o_proj]")
    assert translation.run.actor.lora.exclude_modules == ["o_proj"] and translation.is_whole
    assert listed(translation, f"{MODEL}.exclude_modules") is Difference.changed
    assert listed(translation, f"{MODEL}.lora_rank") is None
    beside = seen(f"{MODEL}.lora_rank=8", f"{MODEL}.exclude_modules=[o_proj]")
    assert beside.run.actor.lora.exclude_modules == ["o_proj"]
    assert listed(beside, f"{MODEL}.lora_rank") is Difference.changed


UNKNOWN = "/ckpt/run7/hf"


def dumped(path: str, image_key: str | None = "images") -> Translation:
    """What becomes of a yaml that verl wrote, in which every key is."""
    data = {"image_key": image_key, "video_key": "videos", "train_files": "/d/a.parquet"}
    tree = {"data": data, "actor_rollout_ref": {"model": {"path": path}, "rollout": {"n": 4}}}
    return translate(of_tree(tree | {"algorithm": {"adv_estimator": "grpo"}}), model_facts(path))


@pytest.mark.parametrize(
    ("path", "column", "kind"),
    [
        (UNKNOWN, None, Difference.unknown), ("Qwen/Qwen3.5-27B", None, Difference.unknown),
        ("Qwen/Qwen3-8B", None, None), (QWEN2_5, "images", Difference.default),
        (f"/ckpt/{QWEN2_5}/global_step_9/actor/huggingface", "images", Difference.default),
    ],
)  # fmt: skip
def test_a_yaml_that_verl_wrote_asks_for_nothing_by_its_defaults(
    path: str, column: str | None, kind: Difference | None
) -> None:
    translation = dumped(path)
    assert listed(translation, "data.image_key") is kind
    assert translation.is_whole is (kind is not Difference.unknown)
    assert translation.run.data.image_key == column
    assert dumped(path, None).is_whole and dumped(path, None).run.data.image_key is None


HINTS = {
    f"{A}.freeze_vision_tower=True": ("actor.vision", "frozen"),
    f"+{R}.limit_images=5": ("data.max_images", 5),
    f"{VLLM}.limit_mm_per_prompt.image=5": ("data.max_images", 5),
    "+data.mm_processor_kwargs.max_pixels=602112": ("data.image_max_pixels", 602_112),
    f"{VLLM}.mm_processor_kwargs.size.shortest_edge=6272": ("data.image_min_pixels", 6272),
}


def test_settings_of_pictures_ask_for_some() -> None:
    """Nobody knows this model: what was written of pictures arrives, and is named."""
    keys = [word.partition("=")[0].lstrip("+") for word in HINTS]
    translation = seen(*HINTS, path=UNKNOWN)
    assert translation.run.data.image_key == "images" and not translation.is_whole
    assert {key: at(translation.run, key) for key, _ in HINTS.values()} == dict(HINTS.values())
    assert {key: listed(translation, key) for key in keys} == dict.fromkeys(keys, Difference.unknown)
    asked = seen(*HINTS, "data.image_key=images", path=UNKNOWN)
    assert asked.is_whole and not {each.verl for each in asked.entries} & {*keys}
    text = seen(*HINTS, path="Qwen/Qwen3-8B")
    assert {key: listed(text, key) for key in keys} == dict.fromkeys(keys, Difference.dropped)
    assert text.is_whole and text.run.data.image_key is None


@pytest.mark.parametrize("word", HINTS)
def test_each_setting_of_pictures_asks_for_some(word: str) -> None:
    verl = of_launch(Launch("verl.trainer.main_ppo", [word]))
    (key,) = verl.written
    assert hints_at_pictures(verl, key)


@pytest.mark.parametrize("path", ["TIGER-Lab/VL-Rethinker-7B", UNKNOWN])
def test_the_sizes_of_an_unknown_processor_are_asked_for(path: str) -> None:
    translation = seen("data.image_key=images", path=path)
    (entry,) = translation.of_kind(Difference.unknown)
    assert entry.verl == "data.image_key" and not translation.of_kind(Difference.absent)
    assert "write data.image_min_pixels and data.image_max_pixels as its preprocessor_config.json" in entry.text
    sized = [f"+data.mm_processor_kwargs.{name}={size}" for name, size in (("min_pixels", 6272), ("max_pixels", 99999))]
    assert seen("data.image_key=images", *sized, path=path).is_whole


def test_every_tower_that_is_read_has_its_sizes() -> None:
    assert PIXELS.keys() == PICTURES.keys()


TWICE = [
    ("+data.mm_processor_kwargs.max_pixels=602112", f"{VLLM}.mm_processor_kwargs.max_pixels=1003520"),
    ("+data.mm_processor_kwargs.max_pixels=602112", "+data.mm_processor_kwargs.size.longest_edge=1003520"),
    (f"{VLLM}.limit_mm_per_prompt.image=5", f"+{R}.limit_images=2"),  # verl's own order
]


@pytest.mark.parametrize("words", TWICE)
def test_of_two_keys_that_are_one_here_the_list_says_which_holds(words: tuple[str, str]) -> None:
    lost, holds = (word.partition("=")[0].lstrip("+") for word in words)
    for order in (words, words[::-1]):
        translation = seen(*order)
        (entry,) = [each for each in translation.of_kind(Difference.changed) if each.verl == lost]
        assert entry.ours.endswith(f"={words[1].partition('=')[2]}") and f"{holds} holds" in entry.text
        assert listed(translation, holds) is None and translation.is_whole
    same = seen(words[0], f"{words[1].partition('=')[0]}={words[0].partition('=')[2]}")
    assert listed(same, lost) is None


def test_an_engine_that_lets_no_picture_in_is_a_run_of_text() -> None:
    limit = f"{VLLM}.limit_mm_per_prompt.image"
    text = seen(f"{limit}=0")
    assert text.run.data.image_key is None and text.is_whole
    assert listed(text, limit.lstrip("+")) is Difference.dropped
    both = seen(f"{limit}=0", "data.image_key=images")
    assert listed(both, "data.image_key") is Difference.absent and not both.is_whole


@pytest.mark.parametrize("key", ["image_key", "video_key"])
def test_a_model_of_text_needs_no_column_of_pictures(key: str) -> None:
    translation = seen(f"data.{key}=images", f"{A}.freeze_vision_tower=True", path="Qwen/Qwen3-8B")
    assert translation.is_whole and translation.run.data.image_key is None
    assert listed(translation, f"data.{key}") is Difference.dropped


def test_fine_tuning() -> None:
    words = [f"model.path={QWEN3}", "data.train_files=[a.parquet]", "optim.warmup_style=cosine"]
    translation = translate(
        of_launch(Launch("verl.trainer.sft_trainer", words)), ModelFacts(sees=True, tower="qwen3_vl")
    )
    assert translation.program == "sft" and translation.run.data.image_key == "images"
    assert translation.run.data.image_min_pixels == 65_536
    assert at(translation.run, "actor.optim.lr_schedule") == "cosine"  # its own name goes before another's default


def test_a_script_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, out = tmp_path / "run.sh", tmp_path / "out.yaml"
    script.write_text(
        f"MODEL=${{MODEL:-{QWEN2_5}}}\npython3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\\n"
        f"  data.image_key=images {MODEL}.path=$MODEL {A}.freeze_vision_tower=True {R}.n=4 $@\n"
    )
    assert main(["from-verl", str(script), "--out", str(out)]) == 0
    made = yaml.safe_load(out.read_text())
    assert (made["data"]["image_key"], made["actor"]["vision"], made["model"]["path"]) == ("images", "frozen", QWEN2_5)
    capsys.readouterr()
    assert main(["from-verl", str(script), "data.video_key=videos", "--out", str(out)]) == 1
    assert "data.video_key=videos" in capsys.readouterr().err
