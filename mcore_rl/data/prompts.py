"""Prompts for training or validation: parquet rows in the field's schema, through the chat template, as tokens.

Everything is read and tokenised once, when the run starts, so that unusable rows are known before anything else is
built.  Rows stay in arrow tables and tokens in one array: 100,000 rows of GSM8K take 0.2 GB.  ``PromptSampler`` decides
the order and resumes it.

A picture has as many tokens as its tower makes of it, from the beginning on: prompts are filtered, cut and planned by
what they become.

Invariant: no prompt here is empty or longer than ``max_prompt_length``, and equal files give equal prompts and ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mcore_rl.config.data import DataConfig, Truncation
from mcore_rl.config.reward import Style
from mcore_rl.data.chat_template import rendered
from mcore_rl.data.media.placed import Placed, SizedImage
from mcore_rl.data.rows import (
    GROUND_TRUTH,
    MESSAGES,
    NO_UTF8,
    AgentRows,
    Ragged,
    Reading,
    SourceFile,
    clean_messages,
    column_problems,
    is_messages,
    is_text,
    named,
    read_files,
    reward_model_problems,
    style_of,
    unread_pictures,
    usable_batches,
    wants_more_than_text,
)
from mcore_rl.ground.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mcore_rl.data.media.prompts import PictureReader  # and with it PIL, which few runs need


class AnswerReader(Protocol):
    """Reads rows' own answers (``answers.py``)."""

    def column_problem(self, file: SourceFile) -> str:
        """Why no row of ``file`` has one; "" if they may."""
        ...

    def read(self, record: dict[str, Any], prompt: Sequence[int]) -> list[int] | str:
        """The tokens that follow ``prompt``, those of the row's; or what is wrong, in words."""
        ...


UNKNOWN = "unknown"  # data source of rows without one, if none is needed


@dataclass(frozen=True)
class PromptRow:
    """One prompt.

    id: ``<file>:<row>``, the same in every run.  tokens: with the chat template and the opening of the answer.
    messages: as in the file.  data_source: selects the reward, and groups rows in validation.  ground_truth: text, a
    list or whatever the file holds; None if nothing is graded.  extra_info: {} if the file has none.  columns: all
    others, ``reward_model`` among them.  number: its number in its ``PromptSet``.  epoch: the pass over the training
    data in which it was drawn, from 0.  answer: tokens of the row's own answer, up to the one that ends the turn; ()
    where it was not asked for.  media: the pictures among the tokens, in order; their column is not in ``columns``.
    """

    id: str
    tokens: tuple[int, ...]
    messages: list[dict[str, Any]]
    data_source: str
    ground_truth: object
    extra_info: dict[str, Any]
    columns: dict[str, Any]
    number: int = 0
    epoch: int = 0
    answer: tuple[int, ...] = ()
    media: tuple[Placed, ...] = ()

    @property
    def style(self) -> Style:
        """Who scores it, by ``reward_model.style``."""
        return style_of(self.columns.get("reward_model"))


@dataclass(kw_only=True)
class PlacedReading(Reading):
    """A reading of rows that may have pictures.  places: (file, row of its table) of each.

    media: the pictures of each, where they are read.
    """

    places: list[tuple[int, int]] = field(default_factory=list)
    media: list[tuple[Placed, ...]] = field(default_factory=list)


class PicturedRows:
    """Rows whose pictures are read again each time they are trained.

    title: the key that names the files.  pictures: what read their pictures; None: they have none.
    """

    def __init__(
        self, files: list[SourceFile], reading: PlacedReading, title: str, pictures: PictureReader | None
    ) -> None:
        self.title = title
        self.pictures = pictures
        self._files = files
        self._places = reading.places
        self._media = reading.media

    @property
    def media(self) -> Sequence[tuple[Placed, ...]]:
        """The pictures of every row; empty where none are read."""
        return self._media

    def patches(self, index: int, place: int) -> NDArray[np.uint8]:
        """The patches of picture ``place`` of a row, made anew.

        DataError: its file is not what it was at the beginning, or is damaged.
        """
        number, row = self._places[index]
        file = self._files[number]
        assert self.pictures is not None, "a row without pictures"
        try:
            return self.pictures.patches(file.record(row), file.folder, self._media[index], place)
        except ValueError as error:
            raise DataError(self.title, [f"{file.row_id(row)}: {error}"]) from error


@dataclass(kw_only=True)
class _Reading(PlacedReading):
    """The state of reading files: how it is done (see ``PromptSet.load``), usable rows, and problems."""

    config: DataConfig
    tokenizer: PreTrainedTokenizerBase
    graded: bool = False
    agents: AgentRows | None = None
    answer_reader: AnswerReader | None = None
    pictures: PictureReader | None = None
    answers: Ragged = field(default_factory=Ragged)  # of each prompt, where they are read
    long_answers: list[str] = field(default_factory=list)  # ids
    longest_answer: int = 0


class PromptSet(PicturedRows):
    """Prompts by number, from 0.

    num_rows: rows read.  num_left_out, num_truncated: rows left out, or cut, since their prompt exceeds
    ``max_prompt_length``, or their own answer ``max_response_length``.  pictures: what read their pictures; None: they
    have none.
    """

    def __init__(self, files: list[SourceFile], reading: _Reading, title: str) -> None:
        super().__init__(files, reading, title, reading.pictures)
        reading.tokens.close()
        reading.answers.close()
        self.num_rows = sum(len(file.numbers) for file in files)
        too_long = len({*reading.too_long, *reading.long_answers})
        self.num_left_out = too_long if reading.config.filter_overlong_prompts else 0
        self.num_truncated = 0 if reading.config.filter_overlong_prompts else too_long
        self._config = reading.config
        self._tokens = reading.tokens
        self._answers = reading.answers

    @classmethod
    def load(
        cls,
        files: Sequence[str | Path],
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_samples: int | None,
        title: str,
        graded: bool = True,
        agents: AgentRows | None = None,
        answers: AnswerReader | None = None,
        pictures: PictureReader | None = None,
    ) -> PromptSet:
        """The prompts of ``files``, in file order.

        max_samples: take only so many rows, the first of a shuffle by ``config.seed``, before long ones are left out.
        title: the key that names the files, as ``data.train_files``.  graded: require a data source for every row, and
        a ground truth unless a reward model or a judge scores it.  agents: read the columns of agents; None: they are
        refused.  answers: reads each row's own answer; None: they are not read.  pictures: reads those of rows, for a
        model that takes some; None: rows that have pictures are refused.

        Raises DataError with every violation: a file that is missing or not parquet, a column that is missing or of the
        wrong type, a row that is null, empty, not UTF-8, without ground truth, refused by the chat template or meant
        for images, videos or agents that are not there, a picture that cannot be read or has no place in the messages,
        prompts or answers that are too long if ``truncation`` is error, a cut through a picture, no prompt left.
        """
        reading = _Reading(
            config=config,
            tokenizer=tokenizer,
            graded=graded,
            agents=agents,
            answer_reader=answers,
            pictures=pictures,
        )
        sources = read_files(files, reading.problems, max_samples=max_samples, seed=config.seed)
        type_problems = partial(_type_problems, reading=reading)
        for number, file, start, records in usable_batches(sources, title, reading.problems, type_problems):
            _take(reading, number, file, start, records)
        return cls._demanded(sources, reading, title)

    @classmethod
    def of_question(cls, question: str, name: str, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
        """One prompt, what a user asks: the tokens that ``load`` makes of a row with this message alone.

        name: stands in its id for the file.  Raises DataError as ``load`` does.
        """
        messages = [{"role": "user", "content": question}]
        table = pa.table({config.prompt_key: [messages]})
        file = SourceFile(name=name, folder=Path(), table=table, numbers=np.zeros(1, dtype=np.int64))
        reading = _Reading(config=config, tokenizer=tokenizer)
        for start, records in file.batches():
            _take(reading, 0, file, start, records)
        return cls._demanded([file], reading, "question")

    @classmethod
    def _demanded(cls, sources: list[SourceFile], reading: _Reading, title: str) -> PromptSet:
        """The prompts that were read.  DataError: with all that is wrong with them."""
        config = reading.config
        key = None if reading.pictures is None else reading.pictures.key
        reading.problems += unread_pictures(sources, reading.more_than_text, key)
        if reading.too_long and not config.filter_overlong_prompts and config.truncation is Truncation.error:
            reading.problems.append(_too_long(reading))
        if reading.long_answers and not config.filter_overlong_prompts and config.truncation is Truncation.error:
            reading.problems.append(_long_answers(reading))
        if not reading.problems and not reading.places:
            reading.problems.append(_nothing_left(reading))
        if reading.problems:
            raise DataError(title, reading.problems)
        return cls(sources, reading, title)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> PromptRow:
        file, row = self._places[index]
        record = self._files[file].record(row)
        messages = clean_messages(record.pop(self._config.prompt_key))
        assert isinstance(messages, list), "load has seen this row"
        graded_by = record.get("reward_model")
        if self.pictures is not None:
            record.pop(self.pictures.key, None)
        return PromptRow(
            id=self._files[file].row_id(row),
            tokens=tuple(self._tokens[index].tolist()),
            messages=messages,
            data_source=record.pop("data_source", None) or UNKNOWN,
            ground_truth=graded_by.get("ground_truth") if isinstance(graded_by, dict) else None,
            extra_info=record.pop("extra_info", None) or {},
            columns=record,
            number=index,
            answer=tuple(self._answers[index].tolist()) if len(self._answers) else (),
            media=self._media[index] if self._media else (),
        )

    def image_files(self, index: int) -> list[bytes]:
        """The files of a prompt's pictures, read again.  DataError: one is not what it was when the run began."""
        number, row = self._places[index]
        file = self._files[number]
        reader = self.pictures
        if reader is None:
            return []
        try:
            return reader.contents(file.record(row), file.folder, self._media[index])
        except ValueError as error:
            raise DataError(self.title, [f"{file.row_id(row)}: {error}"]) from error

    @property
    def data_sources(self) -> list[str]:
        """The data sources of all prompts, each once."""
        sources = set[str]()
        for number, file in enumerate(self._files):
            rows = pa.array([row for each, row in self._places if each == number], type=pa.int64())
            if "data_source" not in file.table.column_names:
                sources |= {UNKNOWN} if len(rows) else set()
                continue
            sources |= {each or UNKNOWN for each in file.table.column("data_source").take(rows).unique().to_pylist()}
        return sorted(sources)

    @property
    def ids(self) -> list[str]:
        """``PromptRow.id`` of every prompt."""
        return [self._files[file].row_id(row) for file, row in self._places]

    def table(self) -> pa.Table:
        """The rows of the prompts, in order, with all columns of the files.

        DataError: a column has different types in two files.
        """
        chosen = []
        for number, file in enumerate(self._files):
            rows = [row for each, row in self._places if each == number]
            chosen.append(file.table.take(pa.array(rows, type=pa.int64())))
        try:
            return pa.concat_tables(chosen, promote_options="default")
        except pa.ArrowException as error:
            problem = f"the files' columns do not go together: {error}. Name files of one schema, or one at a time"
            raise DataError(self.title, [problem]) from error

    @property
    def lengths(self) -> list[int]:
        """Tokens of each prompt."""
        return self._tokens.lengths

    def describe(self) -> str:
        """One line for the user: how many prompts, how long, and how many were left out or cut."""
        mean = sum(self.lengths) / len(self)
        line = (
            f"{self.title}: {len(self):,} prompts of {min(self.lengths)} to {max(self.lengths)} tokens, mean {mean:.0f}"
        )
        line += described_pictures(self._media)
        limit = self._config.max_prompt_length
        longer = f"{limit} tokens"
        if len(self._answers):
            longer += f", or {self._config.max_response_length} of the answer"
        if self.num_left_out:
            line += f"; {self.num_left_out:,} of {self.num_rows:,} left out, longer than {longer}"
        if self.num_truncated:
            line += f"; {self.num_truncated:,} cut to {longer} ({self._config.truncation.value})"
        return line


def described_pictures(media: Sequence[Sequence[Placed]]) -> str:
    """The pictures of all rows, for the user, behind what is said of the rows; "" if there are none."""
    placed = [each for of_row in media for each in of_row]
    if not placed:
        return ""
    sizes = [each.grid.tokens for each in placed]
    different = len({each.image.sha256 for each in placed})
    return f"; {len(placed):,} pictures, {different:,} different, of {min(sizes)} to {max(sizes)} tokens"


def truncated(tokens: Sequence[int], length: int, truncation: Truncation) -> Sequence[int]:
    """At most ``length`` of ``tokens``: cut at the beginning (left), the end (right) or in the middle.

    ``middle`` keeps ``length // 2`` of the beginning and the rest of the end, as verl does.
    """
    assert truncation is not Truncation.error and length >= 1
    if len(tokens) <= length:
        return tokens
    if truncation is Truncation.left:
        return tokens[-length:]
    head = length if truncation is Truncation.right else length // 2
    return [*tokens[:head], *tokens[len(tokens) - (length - head) :]]


def kept_media(media: Sequence[Placed], length: int, limit: int, truncation: Truncation) -> list[Placed] | Placed:
    """``media`` where it stands once ``length`` tokens are cut to ``limit``; or the first picture that the cut meets.

    A picture's opening and closing token count as its own.
    """
    if length <= limit:
        return list(media)
    head = {Truncation.left: 0, Truncation.right: limit, Truncation.middle: limit // 2}[truncation]
    cut = length - limit
    kept = []
    for each in media:
        if each.end + 1 > head and each.first - 1 < head + cut:
            return each
        kept.append(each if each.end < head else each.moved(-cut))
    return kept


def _type_problems(file: SourceFile, reading: _Reading) -> Iterator[str]:
    """Problems of the columns, which make every row of ``file`` unusable."""
    types = {column.name: column.type for column in file.table.schema}
    fits = partial(is_messages, parts=reading.pictures is not None)
    yield from column_problems(file, "data.prompt_key", reading.config.prompt_key, MESSAGES, fits)
    if "data_source" in types and not is_text(types["data_source"]):
        yield f"{file.name}: column data_source is {types['data_source']}, not text. Write the name of the data set"
    if "extra_info" in types and not (pa.types.is_struct(types["extra_info"]) or pa.types.is_null(types["extra_info"])):
        yield f"{file.name}: column extra_info is {types['extra_info']}, not a struct. Write it so, or drop it"
    if reading.graded:
        if "data_source" not in types:
            yield f"{file.name}: no column data_source. {GROUND_TRUTH}"
        yield from reward_model_problems(file)
    if reading.answer_reader is not None and (problem := reading.answer_reader.column_problem(file)):
        yield problem


def _take(reading: _Reading, number: int, file: SourceFile, start: int, records: list[dict[str, Any] | None]) -> None:
    """Add one batch of ``file``, the run's file ``number``, to ``reading``.  start: its first row."""
    config = reading.config
    pictures = reading.pictures
    rows = []
    texts = []
    images = list[list[SizedImage]]()
    for row, record in enumerate(records, start):
        key = "" if pictures is None else pictures.key
        reading.note_more_than_text(file.row_id(row), wants_more_than_text(record or {}, reading.agents, key))
        try:
            text, of_row = _rendered(reading, record, file, row)
        except ValueError as error:
            reading.problems.append(f"{file.row_id(row)}: {error}")
            continue
        rows.append(row)
        texts.append(text)
        images.append(of_row)
    if not texts:
        return
    encoded = reading.tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    for row, tokens, text, of_row in zip(rows, encoded, texts, images, strict=True):
        media: Sequence[Placed] = ()
        if of_row:
            assert pictures is not None, "a row without a reader has no pictures"
            try:
                tokens, media = pictures.placed(text, of_row, reading.tokenizer)
            except ValueError as error:
                reading.problems.append(f"{file.row_id(row)}: {pictures.key}: {error}")
                continue
        if not tokens:
            reading.problems.append(f"{file.row_id(row)}: the chat template makes no token of it. Write some content")
            continue
        answer: list[int] = []
        if reading.answer_reader is not None:
            said = reading.answer_reader.read(records[row - start] or {}, tokens)
            if isinstance(said, str):
                reading.problems.append(f"{file.row_id(row)}: {said}")
                continue
            answer = said
        fits = not answer or len(answer) <= config.max_response_length
        if answer and not fits:
            reading.long_answers.append(file.row_id(row))
            reading.longest_answer = max(reading.longest_answer, len(answer))
        if len(tokens) > config.max_prompt_length:
            reading.note_too_long(file.row_id(row), len(tokens))
            fits = False
        if not fits:
            if config.filter_overlong_prompts or config.truncation is Truncation.error:
                continue
            if media:
                kept = kept_media(media, len(tokens), config.max_prompt_length, config.truncation)
                if isinstance(kept, Placed):
                    reading.problems.append(f"{file.row_id(row)}: {_cut_picture(kept, len(tokens), config)}")
                    continue
                media = kept
            tokens = truncated(tokens, config.max_prompt_length, config.truncation)
        reading.tokens.append(tokens)
        if pictures is not None:
            reading.media.append(tuple(media))
        if answer:
            reading.answers.append(answer[: config.max_response_length])
        reading.places.append((number, row))


def _rendered(
    reading: _Reading, record: dict[str, Any] | None, file: SourceFile, row: int
) -> tuple[str, list[SizedImage]]:
    """(text of the prompt, its pictures) of a row.  ValueError: what is wrong with it, in words."""
    config = reading.config
    agents = reading.agents
    pictures = reading.pictures
    if record is None:
        raise ValueError(NO_UTF8)
    messages = clean_messages(record[config.prompt_key])
    if isinstance(messages, str):
        raise ValueError(f"{config.prompt_key} {messages}. Write {MESSAGES}, or leave the row out")
    if reading.graded:
        if not record["data_source"]:
            raise ValueError("data_source is null or empty. Write the name of the data set")
        asked = record["reward_model"]
        if style_of(asked) is Style.rule and (asked is None or asked.get("ground_truth") is None):
            raise ValueError("reward_model has no ground_truth. Write the right answer, or leave the row out")
    if agents is not None and (problem := agents.problem_of(record)):
        raise ValueError(problem)
    images = [] if pictures is None else pictures.read(record, file.folder, file.row_id(row))
    try:
        if pictures is not None:
            messages = pictures.messages(messages, len(images))
        kwargs: dict[str, Any] = dict(config.chat_template_kwargs)
        if agents is not None and (tools := agents.tools_of(record)):
            kwargs["tools"] = tools
        text = rendered(reading.tokenizer, messages, opens=True, kwargs=kwargs, pictures=pictures is not None)
    except ValueError as error:
        raise ValueError(f"{config.prompt_key}: {error}") from error
    except Exception as error:  # a template is a program of the user's and may raise anything
        remedy = "Mend the messages, or use another template"
        raise ValueError(f"the chat template refuses it: {error}. {remedy}") from error
    return text, images


def _cut_picture(picture: Placed, length: int, config: DataConfig) -> str:
    where = f"the tokens {picture.first} to {picture.end} of {length}"
    limit = f"data.max_prompt_length={config.max_prompt_length}"
    remedy = f"Write data.filter_overlong_prompts=true, {length} tokens, or allow smaller pictures"
    return f"data.truncation={config.truncation.value} would cut the picture at {where}, for {limit}. {remedy}"


def _too_long(reading: _Reading) -> str:
    limit = f"data.max_prompt_length={reading.config.max_prompt_length}"
    count = f"{len(reading.too_long)} prompts have" if len(reading.too_long) > 1 else "1 prompt has"
    remedy = (
        f"Write data.filter_overlong_prompts=true, data.truncation=left, right or middle, or {reading.longest} tokens"
    )
    return f"{count} more than {limit} tokens, the longest {reading.longest}: {named(reading.too_long)}. {remedy}"


def _long_answers(reading: _Reading) -> str:
    limit = f"data.max_response_length={reading.config.max_response_length}"
    count = f"{len(reading.long_answers)} answers have" if len(reading.long_answers) > 1 else "1 answer has"
    remedy = f"Write data.filter_overlong_prompts=true, data.truncation=right, or {reading.longest_answer} tokens"
    longest = f"the longest {reading.longest_answer}: {named(reading.long_answers)}"
    return f"{count} more than {limit} tokens, {longest}. {remedy}"


def _nothing_left(reading: _Reading) -> str:
    if reading.long_answers and not reading.too_long:
        limit = f"data.max_response_length={reading.config.max_response_length}"
        return f"no prompt is left: the answers of all have more than {limit} tokens. Write {reading.longest_answer}"
    if not reading.too_long:
        return "the files have no rows. Name files with prompts"
    limit = f"data.max_prompt_length={reading.config.max_prompt_length}"
    return (
        f"no prompt is left: all {len(reading.too_long)} have more than {limit} tokens. Write up to {reading.longest}"
    )
