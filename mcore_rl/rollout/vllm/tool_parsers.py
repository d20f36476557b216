"""Reads a model's tool calls from its text with vLLM's parsers, which know the forms of the families.

vLLM is imported when a parser is made, in whichever process reads calls; what its import changes in the environment is
put back, so that no process that is started later sees it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mcore_rl.ground.errors import ConfigError, Violation
from mcore_rl.parallel.launch import kept_environment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Attributes of vLLM's parsers that hold what a call begins with.
BEGINNINGS = ("tool_calls_start_token", "tool_call_start_token", "bot_token")


@dataclass(frozen=True, kw_only=True)
class ReadCalls:
    """What a parser read of a turn.

    calls: (name, arguments as JSON) of each call.  unreadable: the text begins a call that cannot be read.
    content: what the turn says besides its calls; "" if the parser does not tell.
    ids: of each call, as the model wrote it, "" where it writes none (of those named here, Kimi-K2 alone writes any);
        () if none has one.
    """

    calls: tuple[tuple[str, str], ...]
    unreadable: bool = False
    content: str = ""
    ids: tuple[str, ...] = ()


class VllmCallReader:
    """Reads calls with the vLLM parser ``name``.

    tokenizer: the model's.  schemas: of the tools, in OpenAI's form.

    ConfigError: vLLM has no such parser, or it cannot read with this tokenizer.
    """

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerBase, schemas: Sequence[Mapping[str, Any]]) -> None:
        with kept_environment():
            from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
            from vllm.tool_parsers import ToolParserManager
        # It logs every call that it cannot read, with a traceback; the model is told instead, and a metric counts them.
        for package in ("vllm.tool_parsers", "vllm.parser"):  # of most families, and of Mistral's and others
            logging.getLogger(package).setLevel(logging.CRITICAL)
        try:
            kind = ToolParserManager.get_tool_parser(name)
        except KeyError as error:
            remedy = f"Write one of {', '.join(ToolParserManager.list_registered())}; or FILE.py:FUNCTION"
            raise _refusal(name, "vLLM has no such parser", remedy) from error
        except ImportError as error:
            remedy = f"Install it (pip install {error.name}), or name another parser"
            raise _refusal(name, f"vLLM's parser needs a package that is not here: {error}", remedy) from error
        try:
            self._request = ChatCompletionRequest(messages=[], model="", tools=[dict(each) for each in schemas] or None)
            self._parser = kind(tokenizer, self._request.tools)
            self._parser.extract_tool_calls("", self._request)
        except Exception as error:
            problem = f"cannot read with this model's tokenizer: {type(error).__name__}: {error}"
            raise _refusal(name, problem, "Name the parser of the model's family") from error
        held = ((each, getattr(self._parser, each)) for each in BEGINNINGS if hasattr(self._parser, each))
        self._beginnings = [beginning for _, beginning in held if isinstance(beginning, str)]

    def read(self, text: str) -> ReadCalls:
        """The calls in ``text``, a turn of the model's with its special tokens."""
        try:
            parsed = self._parser.extract_tool_calls(text, self._request)
            calls = tuple((str(each.function.name), str(each.function.arguments)) for each in parsed.tool_calls or ())
            own = tuple(str(each.id) if each.id and str(each.id) in text else "" for each in parsed.tool_calls or ())
        except Exception:  # noqa: BLE001  whatever a parser does with a text that it does not know
            return ReadCalls(calls=(), unreadable=True)
        unreadable = not calls and any(each in text for each in self._beginnings)
        content = str(parsed.content or "")
        return ReadCalls(calls=calls, unreadable=unreadable, content=content, ids=own if any(own) else ())


def _refusal(name: str, problem: str, remedy: str) -> ConfigError:
    return ConfigError([Violation("rollout.agent.tool_parser", name, problem, remedy)])
