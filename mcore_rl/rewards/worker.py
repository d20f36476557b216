"""A grading process: it takes one request at a time from its pipe and answers with a Score.

``scorer`` starts it, without the secrets of the environment.  It imports neither torch nor vLLM, ignores Ctrl-C, and
ends when its pipe is closed or when the process that started it dies.  Whatever a grader raises or returns becomes a
Score; the scorer detects a grader that hangs or whose process is gone.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import sys
from dataclasses import asdict, replace
from multiprocessing.connection import Connection

from mcore_rl.config.reward import CustomRewardFunction, OverlongConfig, RewardConfig
from mcore_rl.ground.errors import ConfigError
from mcore_rl.ground.secrets import redacted
from mcore_rl.rewards.custom import load_custom
from mcore_rl.rewards.registry import Grader, grader_of
from mcore_rl.rewards.score import NotANumberError, RewardRequest, Score, finite

MEMORY_BYTES = 4 << 30  # of built-in graders: given 10^(10^10) as an answer, sympy would fill the machine's memory
MAX_DETAIL = 500  # characters of an error


def grade(request: RewardRequest, config: RewardConfig, custom: Grader | None = None) -> Score:
    """The Score of ``request`` by ``custom``, or else by the grader of its data source, plus the overlong penalty.

    Never raises: for an exception or a value that is not finite, the Score has an ``error`` and ``error_score``.
    """
    try:
        score = (custom or grader_of(request.data_source))(request if custom else _answer_part(request, config), config)
        value = finite(score.value, "the score")
        parts = dict(score.parts)
    except NotANumberError as error:
        return failed("not_a_number", str(error), config)
    except (Exception, SystemExit) as error:  # noqa: BLE001  whatever a grader does
        where = "".join(f", {note}" for note in error.__dict__.get("__notes__", ()))
        return failed("raised", f"{type(error).__name__}: {error}{where}", config)
    if config.overlong.enable:
        parts["overlong"] = overlong_penalty(request.num_tokens, request.max_tokens, config.overlong)
        value += parts["overlong"]
    return replace(score, value=value, parts=parts, error=None)


def overlong_penalty(num_tokens: int, max_tokens: int, config: OverlongConfig) -> float:
    """DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13), which is added to a value.

    It is 0 up to ``max_tokens - length``, then falls linearly to ``-penalty_factor`` at ``max_tokens``, and stays
    there.
    num_tokens: length of the response.  max_tokens: its limit.
    """
    length = config.tokens(max_tokens)
    exceeded = num_tokens - (max_tokens - length)
    return -config.penalty_factor * min(max(exceeded / length, 0.0), 1.0)


def _answer_part(request: RewardRequest, config: RewardConfig) -> RewardRequest:
    """``request`` with what follows the thought, nothing if it has no end."""
    if not config.answer_after:
        return request
    _, ended, answer = request.response.rpartition(config.answer_after)
    return replace(request, response=answer if ended else "")


def failed(kind: str, detail: str, config: RewardConfig) -> Score:
    """The Score of a response that could not be graded; ``kind`` is one of ``ERROR_KINDS``."""
    return Score(config.error_score, error=f"{kind}: {redacted(detail)[:MAX_DETAIL]}")


def packed(score: Score) -> bytes:
    """``score`` as JSON, for the pipe.

    Not a pickle: a custom function may run a program that a model wrote, which could write to the pipe, and unpickling
    its bytes would run its code in the scorer.
    """
    return json.dumps(asdict(score)).encode()


def unpacked(message: bytes) -> Score:
    """The Score that ``packed`` wrote.  ValueError: ``message`` is not one."""
    try:
        payload = json.loads(message)
        value = finite(payload.pop("value"), "the score")
        correct = payload.pop("correct")
        parts = {str(name): finite(part, name) for name, part in payload.pop("parts").items()}
        said = {name: payload[name] if payload[name] is None else str(payload[name]) for name in ("error", "answer")}
        turns = tuple(finite(each, "a turn reward") for each in payload.pop("turn_rewards"))
        correct = correct if correct is None else finite(correct, "correct")
        return Score(value, parts, correct, **said, turn_rewards=turns)
    except (AttributeError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"the grading process did not answer with a score: {error!r}") from error


def refusal_of(message: bytes) -> ConfigError | None:
    """The ConfigError with which a worker began; None if it is ready.  OSError: ``message`` is neither."""
    try:
        words = json.loads(message)
        return ConfigError.of_plain([str(word) for word in words]) if words else None
    except (ValueError, RecursionError, TypeError, AssertionError) as error:
        raise OSError(f"the grading process began with {message[:80]!r}") from error


def main(descriptor: int) -> None:
    """Serves on the socket ``descriptor`` until it is closed.

    First receives (config, custom) and answers with its ``refusal``: none, or of a custom function that cannot be
    loaded.  Then answers each pickled request with a ``packed`` Score.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.set_int_max_str_digits(0)
    own = os.getpid()
    with Connection(descriptor) as connection:
        config, custom = connection.recv()
        grader: Grader | None = None
        try:
            grader = _loaded(custom) if custom.path is not None else None
        except ConfigError as error:
            connection.send_bytes(json.dumps(error.plain()).encode())
            return
        if grader is None:
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
        connection.send_bytes(b"[]")
        while True:
            try:
                message = connection.recv_bytes()
            except (EOFError, ConnectionError):
                return
            score = _answer(message, config, grader)
            if os.getpid() != own:  # a child that a custom function forked returned from the function
                os._exit(0)
            connection.send_bytes(packed(score))


def _loaded(custom: CustomRewardFunction) -> Grader:
    """The user's function.  Where its import hangs, in C too, the kernel ends this process; see ``import_refusal``."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, custom.import_timeout_s)
    try:
        return load_custom(custom)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _answer(message: bytes, config: RewardConfig, custom: Grader | None) -> Score:
    try:
        request = pickle.loads(message)
    except Exception as error:  # noqa: BLE001  whatever unpickling a column's value does
        return failed("raised", f"the row cannot be read in the grading process: {error}", config)
    return grade(request, config, custom)
