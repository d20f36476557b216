"""A judge behind OpenAI's chat completions, over real HTTP: it grades sums by a rule, and can misbehave on request."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "sk-of-the-tests-0123456789"
NAME = "JUDGE_API_KEY"  # of the environment variable


@dataclass(frozen=True)
class Reply:
    """What the server sends: status, body and headers, after ``wait_s``."""

    body: bytes
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    wait_s: float = 0.0


@dataclass
class JudgeServer:
    """url: its base.  said: makes the judge's text of what it is asked.  replies: sent first, one a request.

    requests: (headers, body) of all that came.  most: the most that were under way at once.  work_s: of a request.
    """

    said: Callable[[str], str]
    url: str = ""
    replies: list[Reply] = field(default_factory=list)
    requests: list[tuple[dict[str, str], dict[str, Any]]] = field(default_factory=list)
    most: int = 0
    work_s: float = 0.0
    _now: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def prompts(self) -> list[str]:
        """What it was asked, in order."""
        return [body["messages"][-1]["content"] for _, body in self.requests]

    def reply(self, headers: dict[str, str], body: dict[str, Any]) -> Reply:
        """The next reply."""
        with self._lock:
            self.requests.append((headers, body))
            self._now += 1
            self.most = max(self.most, self._now)
            scripted = self.replies.pop(0) if self.replies else None
        time.sleep(self.work_s)
        with self._lock:
            self._now -= 1
        return scripted or completion(self.said(body["messages"][-1]["content"]))


def completion(text: str | None, **more: Any) -> Reply:
    """An answer as OpenAI's: 100 tokens read, 10 written."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"} | more
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    answer = {"id": "1", "object": "chat.completion", "model": "m", "choices": [choice], "usage": usage}
    return Reply(json.dumps(answer).encode())


@contextmanager
def serving(said: Callable[[str], str]) -> Iterator[JudgeServer]:
    """A server on a free port of the loopback, while open."""
    server = JudgeServer(said)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/chat/completions"
            reply = server.reply(dict(self.headers), body)
            time.sleep(reply.wait_s)
            self.send_response(reply.status)
            for name, value in {"Content-Length": str(len(reply.body)), **reply.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(reply.body)

        def do_GET(self) -> None:
            raise AssertionError("a redirect was followed")

        def log_message(self, *args: Any) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *args: Any) -> None:
            pass  # a client that left

    with Quiet(("127.0.0.1", 0), Handler) as http:
        server.url = f"http://127.0.0.1:{http.server_port}/v1"
        threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        try:
            yield server
        finally:
            http.shutdown()
