"""Serves the report of a run while the run goes on: to this machine alone, one page, and nothing else.

The server listens on the loopback address.  What it answers is the page, made anew when a file of the run has changed,
at a path with a secret that the command prints, so that no other user of the machine finds it.  A request that names
another host in its ``Host`` is refused: a page of the web that has its name lead here (DNS rebinding) sends its own.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from mcore_rl.ground.errors import ConfigError, Violation
from mcore_rl.tracking.report import report_page
from mcore_rl.tracking.run_files import read_run
from mcore_rl.tracking.run_owner import OWNER

LOOPBACK = "127.0.0.1"
HOSTS = (LOOPBACK, "localhost")
LOOK_S = 2  # between two looks of the page
SHARE = 0.2  # of a core
WATCHED = (
    "metrics.jsonl",
    "timeline.jsonl",
    "lanes.jsonl",
    "environment.json",
    "config.yaml",
    "plan.json",
    OWNER,
    "rollouts",
    "validation",
)
HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class LivePage:
    """The page of the run in ``run_dir``, made when it is asked for and a file has changed.

    The run needs the processor more: making pages takes at most ``SHARE`` of the time, and a page may be that old.
    now: seconds from any start, never backwards.
    """

    def __init__(self, run_dir: Path, now: Callable[[], float] = time.monotonic) -> None:
        self._run_dir = run_dir
        self._now = now
        self._lock = threading.Lock()
        self._made: tuple[str, bytes] = "", b""
        self._next = now()

    def tag(self) -> str:
        """Names the state of the run's files; another state has another."""
        said = []
        for name in WATCHED:
            try:
                status = (self._run_dir / name).stat()
            except OSError:
                continue
            beats = name == OWNER  # touched as a sign of life, which changes nothing
            said.append(f"{name} {status.st_ino} {status.st_size} {'' if beats else status.st_mtime_ns}")
        return f'"{sha256(repr(said).encode()).hexdigest()[:32]}"'

    def get(self) -> tuple[str, bytes]:
        """(tag, page).  ConfigError: the run is gone."""
        with self._lock:
            tag = self.tag()
            start = self._now()
            if self._made[0] != tag and start >= self._next:
                live = {"live": str(LOOK_S), "tag": tag}
                self._made = tag, report_page(read_run(self._run_dir), live).encode()
                self._next = self._now() + (self._now() - start) / SHARE
            return self._made


class ReportServer(ThreadingHTTPServer):
    """Listens from its making on.  port: 0 is any free one.  ConfigError: no run, or the port is taken."""

    daemon_threads = True

    def __init__(self, run_dir: Path, port: int) -> None:
        read_run(run_dir)
        self.page = LivePage(run_dir)
        self.path = f"/{secrets.token_urlsafe(16)}"
        try:
            super().__init__((LOOPBACK, port), PageHandler)
        except OSError as error:
            remedy = "Leave it out, and a free one is taken, or write another"
            raise ConfigError([Violation("port", port, f"cannot be listened on: {error.strerror}", remedy)]) from error

    @property
    def address(self) -> str:
        """Where the page is, for a browser on this machine."""
        return f"http://{LOOPBACK}:{self.server_address[1]}{self.path}"

    def server_bind(self) -> None:
        """As the base class, without asking a name server for this machine's name."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name = HOSTS[1]
        self.server_port = self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: a browser may go away in the midst of an answer."""


class PageHandler(BaseHTTPRequestHandler):
    """Answers one browser."""

    server: ReportServer
    server_version = "mcore-rl"
    sys_version = ""
    timeout = 30  # seconds, for a client that says nothing

    def do_GET(self) -> None:
        """The page, 304 if the browser has it; 403 for another host, 404 for another path."""
        if (self.headers.get("Host") or "").partition(":")[0] not in HOSTS:
            return self._refuse(403)
        if not secrets.compare_digest(self.path.encode(), self.server.path.encode()):
            return self._refuse(404)
        try:
            tag, page = self.server.page.get()
        except ConfigError:
            return self._refuse(410)  # the run's directory is gone
        if self.headers.get("If-None-Match") == tag:
            return self._send(304, {"ETag": tag})
        return self._send(200, {"ETag": tag}, page)

    do_HEAD = do_GET  # without the body

    def _refuse(self, status: int) -> None:
        self._send(status, {"Content-Type": "text/plain; charset=utf-8"}, f"{status}\n".encode())

    def _send(self, status: int, headers: dict[str, str], body: bytes | None = None) -> None:
        length = {} if body is None else {"Content-Length": str(len(body))}
        self.send_response(status)
        for name, value in (HEADERS | headers | length).items():
            self.send_header(name, value)
        self.end_headers()
        if body is not None and self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Says nothing: the terminal has the address, and no line for every look."""
