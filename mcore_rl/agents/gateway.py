"""An OpenAI-compatible server in front of the run's engines, for programs that users wrote.

Each run of a program has a secret of its own, which says whose conversations a request belongs to.  Nothing else opens
it: without one, every path but the refusal is closed.  It listens at the loopback unless the configuration says
otherwise, has no TLS, and unpickles nothing.  What nobody with a secret asks for is limited (``connections``).

Invariants: a secret is good from ``opened`` to its end, and no longer; then whatever was under way for it is cancelled.
A request costs at most the episode that it belongs to.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import json
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError

from mcore_rl.agents.connections import Connections, Watched
from mcore_rl.agents.conversations import OVER, Context, Conversations, ModelTurn
from mcore_rl.agents.openai_answers import Answer, AnswerWriter, message_of, models
from mcore_rl.agents.openai_requests import (
    ApiError,
    AskedSampling,
    chat_request,
    completion_request,
    parsed_body,
    read_message,
)
from mcore_rl.agents.rendering import call_id
from mcore_rl.agents.session import SessionParts
from mcore_rl.ground.errors import ConfigError, Violation
from mcore_rl.rewards.score import NotANumberError, finite
from mcore_rl.rollout.vllm.tool_parsers import ReadCalls

MAX_BODY = 32 << 20  # bytes of a request, however long conversations may be
BODY, BODY_PER_TOKEN = 1 << 20, 64  # bytes of a request: for tools, and for each token that a conversation may have
HEARTBEAT_S = 10.0  # between the comments that keep a stream open while nothing is said
ReadCallsOf = Callable[[Sequence[Mapping[str, Any]], str, str], ReadCalls]  # (tools, ``raw``, ``after`` of a turn)
logger = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class Access:
    """What one run of a program may do.

    key: its secret.  conversations: what it made the model say.  takes_reward: it may say what it is worth.
    max_body: bytes of a request.
    reward: what it said; the last word counts.  work: requests under way.
    """

    key: str
    conversations: Conversations
    takes_reward: bool
    max_body: int = MAX_BODY
    reward: float | None = None
    work: set[asyncio.Task[Any]] = field(default_factory=set)
    ids: Any = field(default_factory=itertools.count)


class Gateway:
    """Serves the runs of programs that are ``opened``.

    host, port: where it listens; port 0 is any that is free.  parts: of all sessions.  read_calls: reads the calls in
    a turn of a conversation with tools.
    """

    def __init__(self, host: str, port: int, parts: SessionParts, read_calls: ReadCallsOf) -> None:
        self._host = host
        self._port = port
        self._parts = parts
        self._read_calls = read_calls
        self._open: dict[str, Access] = {}  # by the public half of the key
        self._told = set[str | type[Exception]]()  # settings without effect, and kinds of our failures
        self.connections = Connections()
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> str:
        """Listens, if it does not yet; returns the URL.  ConfigError: it cannot listen there."""
        async with self._starting:
            if self._server is None:
                app = web.Application(client_max_size=MAX_BODY, middlewares=[self._refused])
                app.router.add_post("/v1/chat/completions", self._for_all(self._chat))
                app.router.add_post("/v1/completions", self._for_all(self._completion))
                app.router.add_post("/v1/episode/reward", self._for_all(self._reward))
                app.router.add_get("/v1/models", self._for_all(self._models))
                runner = web.AppRunner(
                    app, access_log=None, handler_cancellation=True, shutdown_timeout=0.0, logger=_silent()
                )
                await runner.setup()
                serve = runner.server
                assert serve is not None
                listening = asyncio.get_running_loop().create_server(
                    lambda: Watched(self.connections, serve()), self._host, self._port
                )
                try:
                    self._server = await listening
                except OSError as error:
                    await runner.cleanup()
                    problem = f"the gateway cannot listen at {self._host}: {error.strerror}"
                    remedy = "Write 0, which takes a port that is free, or an address of this machine as host"
                    raise ConfigError([Violation("rollout.agent.program.port", self._port, problem, remedy)]) from error
                self._runner = runner
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"

    @asynccontextmanager
    async def opened(self, conversations: Conversations, *, takes_reward: bool) -> AsyncIterator[Access]:
        """While open: a key is good for ``conversations``."""
        public = secrets.token_hex(8)
        access = Access(
            key=f"mcore-rl-{public}-{secrets.token_urlsafe(32)}",
            conversations=conversations,
            takes_reward=takes_reward,
            max_body=min(MAX_BODY, BODY + BODY_PER_TOKEN * conversations.max_tokens),
        )
        self._open[public] = access
        try:
            yield access
        finally:
            del self._open[public]
            self.connections.forget(access)
            for task in access.work:
                task.cancel()
            await asyncio.gather(*access.work, return_exceptions=True)

    def stop(self) -> None:
        """Listens no longer; connections that are open end with their episodes."""
        if self._server is not None:
            with suppress(RuntimeError):  # the event loop has ended before
                self._server.close()
            self._server = None

    async def close(self) -> None:
        """``stop``, and ends all connections."""
        self.stop()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _for_all(
        self, handle: Callable[[web.Request, Access], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """``handle`` for whoever has a secret, as a part of its run's work."""

        async def handled(request: web.Request) -> web.StreamResponse:
            access = self._access(request)
            task = asyncio.current_task()
            assert task is not None
            access.work.add(task)
            try:
                return await handle(request, access)
            finally:
                access.work.discard(task)

        return handled

    def _access(self, request: web.Request) -> Access:
        """Whose request it is.  ApiError: nobody's."""
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        access = self._open.get("".join(key.split("-")[2:3])) if scheme.lower() == "bearer" else None
        if access is None or not hmac.compare_digest(access.key.encode(), key.strip().encode(errors="surrogateescape")):
            said = "no such key, or its episode is over. Send the OPENAI_API_KEY of the program's environment"
            raise ApiError(401, said, code="invalid_api_key")
        if not self.connections.know(request.transport, access):
            said = "the episode has too many connections. Use one client for all of it, or close those that are done"
            raise ApiError(429, said, code="too_many_connections")
        return access

    async def _models(self, request: web.Request, access: Access) -> web.StreamResponse:
        return web.json_response(models())

    async def _reward(self, request: web.Request, access: Access) -> web.StreamResponse:
        body = parsed_body(await _body(request, access.max_body))
        if not access.takes_reward:
            said = "rollout.agent.program.reward=grader: the row's grader says what the episode is worth. Write program"
            raise ApiError(409, said, code="reward_not_taken")
        try:
            if isinstance(body.get("reward"), bool):
                raise NotANumberError("reward is a bool, not a finite number")
            access.reward = finite(body.get("reward"), "reward")
        except NotANumberError as error:
            raise ApiError(400, f"{error}. Write {{reward: 0.5}}", param="reward") from error
        return web.json_response({"reward": access.reward})

    async def _chat(self, request: web.Request, access: Access) -> web.StreamResponse:
        conversations = access.conversations
        asked = chat_request(parsed_body(await _body(request, access.max_body)), conversations.sampling)
        context = conversations.chat(asked.messages, asked.tools)

        def answer(turn: ModelTurn) -> Answer:
            read = self._read_calls(asked.tools, turn.said.raw, turn.said.after) if asked.calls else None
            if read is not None:
                conversations.num_calls += len(read.calls) + read.unreadable
                conversations.num_failed += read.unreadable
            message = message_of(turn, read, lambda: call_id(next(access.ids)))
            conversations.keep(context, turn, read_message(message))
            return Answer(turn=turn, message=message)

        return await self._answered(request, access, asked.asked, context, answer)

    async def _completion(self, request: web.Request, access: Access) -> web.StreamResponse:
        conversations = access.conversations
        asked, prompt = completion_request(parsed_body(await _body(request, access.max_body)), conversations.sampling)
        context = conversations.completion(prompt)

        def answer(turn: ModelTurn) -> Answer:
            conversations.keep(context, turn, None)
            return Answer(turn=turn)

        return await self._answered(request, access, asked, context, answer)

    async def _answered(
        self,
        request: web.Request,
        access: Access,
        asked: AskedSampling,
        context: Context,
        answer: Callable[[ModelTurn], Answer],
    ) -> web.StreamResponse:
        """Draws, and sends what was drawn.  answer: takes a turn into the episode; only of one that can be sent."""
        self._tell(asked.overridden)
        conversations = access.conversations
        draws = [
            asyncio.ensure_future(conversations.draw(context, asked.max_tokens, asked.stop)) for _ in range(asked.n)
        ]
        writer = AnswerWriter(self._parts.tokenizer, asked, context, f"mcore-rl-{next(access.ids)}")
        stream = None
        try:
            if asked.stream and not await _fail_at_once(draws):
                stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
                await stream.prepare(request)
                await _kept_open(stream, draws)
            answers = [answer(turn) for turn in await asyncio.gather(*draws)]
            if stream is None:
                return web.json_response(writer.whole(answers))
            for event in writer.events(answers):
                await stream.write(event)
        except ApiError as error:
            if stream is None:
                raise
            await stream.write(f"data: {json.dumps(error.body)}\n\n".encode())
        finally:
            for draw in draws:
                draw.cancel()
            await asyncio.gather(*draws, return_exceptions=True)
        await stream.write_eof()
        return stream

    @web.middleware
    async def _refused(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """What ``handler`` answers, or its refusal in OpenAI's form."""
        try:
            return await handler(request)
        except ApiError as error:
            refusal = error
        except web.HTTPException as error:
            said = f"{request.method} {request.path[:80]}: {error.reason}"
            refusal = ApiError(error.status, said, code="no_such_path")
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:  # noqa: BLE001  of whatever a request made us do; the program is told, and may go on
            if type(error) not in self._told:
                self._told.add(type(error))
                logger.warning("the gateway failed: %r. Others of this kind are not told", error)
            refusal = ApiError(500, f"{type(error).__name__}", code=OVER)
        with suppress(ConnectionError):
            return web.json_response(refusal.body, status=refusal.status)
        raise ConnectionResetError

    def _tell(self, overridden: Sequence[str]) -> None:
        """Says once of each setting that it has no effect."""
        for each in overridden:
            name = each.partition("=")[0]
            if name not in self._told:
                self._told.add(name)
                logger.warning(
                    "a program asks for %s: the run's own distribution is drawn from, since it is what is trained. "
                    "Others of %s are not told",
                    each,
                    name,
                )


def _silent() -> logging.Logger:
    """aiohttp's logger: it would write a traceback of each request that is none, which anybody here may send."""
    silent = logging.getLogger(f"{__name__}.http")
    silent.disabled = True
    return silent


async def _body(request: web.Request, most: int) -> bytes:
    """The bytes of a request.  ApiError: there are more than ``most``, or they are not packed as it says."""
    body = bytearray()
    try:
        async for piece in request.content.iter_any():
            body += piece
            if len(body) > most:
                remedy = "Say less: a conversation has at most data.max_prompt_length and data.max_response_length"
                raise ApiError(413, f"the request has more than {most} bytes. {remedy}", code="too_large")
    except (web.RequestPayloadError, HttpProcessingError) as error:
        raise ApiError(400, f"the request cannot be read: {error}"[:200]) from error
    return bytes(body)


async def _fail_at_once(draws: Sequence[asyncio.Future[ModelTurn]]) -> bool:
    """Whether a draw fails before a stream has to be opened, so that its status can say so."""
    done, _ = await asyncio.wait(draws, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_EXCEPTION)
    return any(each.exception() for each in done)


async def _kept_open(stream: web.StreamResponse, draws: Sequence[asyncio.Future[ModelTurn]]) -> None:
    """Waits for ``draws``, and sends a comment now and then meanwhile."""
    while True:
        _, waiting = await asyncio.wait(draws, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_EXCEPTION)
        if not waiting or any(each.done() and each.exception() for each in draws):
            return
        await stream.write(b": drawing\n\n")
