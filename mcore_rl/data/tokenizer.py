"""Loads the tokenizer of a checkpoint and checks, before anything starts, that it has what training needs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_rl.ground.errors import DataError
from mcore_rl.ground.json_text import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")  # any of them makes a tokenizer
TITLE = "tokenizer"
PLAIN = "TokenizersBackend"  # transformers' class for whatever tokenizer.json says
# Model types for which AutoTokenizer takes another class where the files name that one.
OTHERWISE = ("qwen2", "qwen3_5_moe_text")


def load_tokenizer(path: str | Path, *, trained: bool = True) -> PreTrainedTokenizerBase:
    """transformers' fast tokenizer of a Hugging Face directory.

    trained: its model is trained; a model that only scores needs no eos token.  Nothing is padded.

    Raises DataError with every violation: no such directory, no tokenizer in it, files that cannot be read, no fast
    tokenizer, no chat template, no eos token.  Each names the file and the remedy.
    """
    directory = Path(path).expanduser()
    tokenizer = _read(directory)
    problems = _problems(tokenizer, trained)
    if problems:
        raise DataError(f"{TITLE} {directory}", problems)
    return tokenizer


def end_tokens(path: str | Path) -> frozenset[int]:
    """The tokens at which an engine that serves the Hugging Face directory ``path`` stops, besides the tokenizer's eos.

    They are ``eos_token_id`` of generation_config.json, or of config.json where there is no such file, as vLLM has it.
    """
    directory = Path(path).expanduser()
    generation = directory / "generation_config.json"
    values = _values(generation if generation.exists() else directory / "config.json")
    written = values.get("eos_token_id")
    ids = written if isinstance(written, list) else [written]
    return frozenset(each for each in ids if isinstance(each, int))


def vocabulary_difference(tokenizer: PreTrainedTokenizerBase, path: str | Path) -> str | None:
    """Which tokens of ``tokenizer`` the Hugging Face directory ``path`` has otherwise, in words; None: none.

    A number that may be drawn must mean the same text to both.  Merges, templates and padding may differ, and it may
    have more tokens, since tokens are scored there and no text is read.  Raises DataError if ``path`` has no tokenizer
    that can be read.
    """
    ours = tokenizer.get_vocab()
    theirs = _read(Path(path).expanduser()).get_vocab()
    wrong = [name for name, number in ours.items() if theirs.get(name) != number]
    if not wrong:
        return None
    first = min(wrong, key=ours.__getitem__)
    there = theirs.get(first, "none")
    return f"the numbers of {len(wrong):,} tokens differ, first of {first!r}: {there} there, and {ours[first]} here"


def _read(directory: Path) -> PreTrainedTokenizerBase:
    title = f"{TITLE} {directory}"
    if not directory.is_dir():
        raise DataError(title, ["is no directory. Name one of a Hugging Face checkpoint (model.tokenizer_path)"])
    if not any((directory / name).exists() for name in FILES):
        problem = f"has no tokenizer: none of {', '.join(FILES)}"
        raise DataError(title, [f"{problem}. Copy them from the model, or name their directory as tokenizer_path"])
    try:
        tokenizer: PreTrainedTokenizerBase = _class_of(directory).from_pretrained(directory)
    except Exception as error:  # the tokenizers library raises plain Exceptions for broken files
        problem = f"the files cannot be read: {type(error).__name__}: {error}"
        raise DataError(title, [f"{problem}. Copy the tokenizer's files from the model again"]) from error
    return tokenizer


def _class_of(directory: Path) -> Any:
    """AutoTokenizer, which imports transformers' models and torch's compiler; or at once the class that it takes."""
    settings, model = (_values(directory / name) for name in ("tokenizer_config.json", "config.json"))
    plain = settings.get("tokenizer_class") == PLAIN and "auto_map" not in settings
    if plain and model.get("model_type") not in OTHERWISE:
        from transformers import TokenizersBackend

        return TokenizersBackend
    from transformers import AutoTokenizer

    return AutoTokenizer


def _values(path: Path) -> dict[str, Any]:
    """The values of a json file; {} where there is none, or none that can be read, which transformers says."""
    try:
        values = read_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _problems(tokenizer: PreTrainedTokenizerBase, trained: bool) -> list[str]:
    """The problems of ``tokenizer`` for training, or for scoring."""
    problems = []
    if not tokenizer.is_fast:
        remedy = "Save it as tokenizer.json with transformers (AutoTokenizer...save_pretrained)"
        problems.append(f"{type(tokenizer).__name__} is no fast tokenizer: it cannot say where tokens stand. {remedy}")
    if not tokenizer.chat_template:
        remedy = "Put the chat template of the model's instruct version there (chat_template.jinja)"
        problems.append(f"chat_template.jinja: there is none, and none in tokenizer_config.json. {remedy}")
    elif _is_deaf(tokenizer):
        remedy = "Take the template of the model's instruct version (chat_template.jinja)"
        problems.append(f"chat_template.jinja: writes the same text whatever a user's message says. {remedy}")
    if trained and tokenizer.special_tokens_map.get("eos_token") is None:
        remedy = 'Write "eos_token": "<|endoftext|>", or another token of its vocabulary, into it'
        problems.append(f"tokenizer_config.json: no eos_token. {remedy}")
    return problems


def _is_deaf(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template writes one text for two messages of a user.  A template that refuses both is not."""
    try:
        first, second = (
            tokenizer.apply_chat_template([{"role": "user", "content": said}], tokenize=False)
            for said in ("one question", "another question")
        )
    except Exception:  # noqa: BLE001 - templates raise anything; with the rows it is said what
        return False
    return bool(first == second)
