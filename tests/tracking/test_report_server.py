from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import psutil
import pytest

from mcore_rl.ground.errors import ConfigError
from mcore_rl.tracking.report_server import LivePage, ReportServer
from tests.house.source import ROOT
from tests.support.browser import browser, needs_chromium
from tests.tracking.recorded_run import record


@contextmanager
def serving(run_dir: Path) -> Iterator[ReportServer]:
    with ReportServer(run_dir, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("runs") / "live", total_steps=6, until=3, test_freq=3)


@pytest.fixture
def server(run_dir: Path) -> Iterator[ReportServer]:
    with serving(run_dir) as started:
        yield started


def asked(
    server: ReportServer, path: str | None = None, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer.  path: None is the page's."""
    connection = HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    connection.request(
        method, server.path if path is None else path, headers={k.replace("_", "-"): v for k, v in headers.items()}
    )
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, dict(answer.getheaders()), body


def test_the_page_is_there_and_nothing_else(server: ReportServer, run_dir: Path) -> None:
    status, headers, body = asked(server)
    assert status == 200 and b"live: step 3 of 6 steps recorded" in body and b"connect-src 'self'" in body
    assert headers["Cache-Control"] == "no-store" and headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert asked(server, method="HEAD")[2] == b""
    secret = server.path
    others = [
        "/", "", "/metrics.jsonl", "/config.yaml", "/../", f"{secret}/", f"{secret}/..", f"{secret}/config.yaml",
        f"{secret}?x", secret[:-1], secret.swapcase(), "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd",
        str(run_dir / "config.yaml"),
    ]  # fmt: skip
    for other in others:
        status, _, body = asked(server, other)
        assert (status, body) == (404, b"404\n"), other
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert asked(server, method=method)[0] == 501
    assert not (run_dir / "report.html").exists(), "serving writes nothing"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "localhost.evil.example:1"]
)
def test_another_host_name_is_refused(server: ReportServer, host: str) -> None:
    assert asked(server, Host=host)[0] == 403


@pytest.mark.parametrize("host", ["127.0.0.1:1", "localhost:8888", "localhost"])
def test_this_machine_is_answered_also_through_a_forwarded_port(server: ReportServer, host: str) -> None:
    assert asked(server, Host=host)[0] == 200


def test_it_listens_on_the_loopback_address_alone(server: ReportServer) -> None:
    port = server.server_address[1]
    listening = [each.laddr for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    assert [each for each in listening if each.port == port] == [("127.0.0.1", port)]
    for interface, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                with socket.socket() as caller:
                    caller.settimeout(5)
                    assert caller.connect_ex((address.address, port)), f"{interface} answers"


def test_the_page_comes_again_when_the_run_has_gone_on_and_not_before(tmp_path: Path) -> None:
    path = record(tmp_path / "run", total_steps=6, until=3, test_freq=3)
    with serving(path) as server:
        _, headers, _ = asked(server)
        status, _, body = asked(server, If_None_Match=headers["ETag"])
        assert (status, body) == (304, b"")
        with (path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 4, "reward/mean": 0.5, "time/step": 1.0}) + "\n")
        while (answer := asked(server, If_None_Match=headers["ETag"]))[0] == 304:
            time.sleep(0.05)  # a page that took a second to make is five seconds old before the next
        status, after, body = answer
        assert status == 200 and b"step 4 of 6" in body and after["ETag"] != headers["ETag"]
        path.rename(tmp_path / "gone")
        while (status := asked(server)[0]) == 200:
            time.sleep(0.05)
        assert status == 410


def test_making_pages_takes_a_fifth_of_the_time_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = record(tmp_path / "run", total_steps=2, test_freq=2)
    hand = {"at": 100.0}

    def slow(*_: object) -> str:
        hand["at"] += 3.0
        return "page"

    monkeypatch.setattr("mcore_rl.tracking.report_server.report_page", slow)
    page = LivePage(path, lambda: hand["at"])
    for step in range(3, 43):  # a step a second, and as many looks
        hand["at"] += 1.0
        with (path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step}) + "\n")
        page.get()
    assert hand["at"] == 100.0 + 40 + 3 * 3, "at the first look, at the 16th and at the 31st"


def test_what_cannot_be_served_is_said(tmp_path: Path, server: ReportServer) -> None:
    with pytest.raises(ConfigError, match=r"run_dir=.*holds none of"):
        ReportServer(tmp_path, 0)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"port=\d+: cannot be listened on: Address already in use"):
        ReportServer(tmp_path, server.server_address[1])


def test_the_command_says_the_address_and_ends_with_one_line(run_dir: Path) -> None:
    command = [sys.executable, "tools/report.py", str(run_dir), "--serve"]
    started = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert started.stdout is not None
        address = started.stdout.readline().split()[0]
        port, path = address.removeprefix("http://127.0.0.1:").split("/")
        connection = HTTPConnection("127.0.0.1", int(port), timeout=60)
        connection.request("GET", f"/{path}")
        assert connection.getresponse().status == 200
        os.kill(started.pid, signal.SIGINT)
        out, err = started.communicate(timeout=60)
    finally:
        started.kill()
        started.wait()
    assert (started.returncode, out, err) == (130, "", "Stopped.\n")


@pytest.mark.tier("ci")
@needs_chromium
def test_an_open_page_follows_the_run_and_keeps_what_its_reader_did(tmp_path: Path) -> None:
    path = record(tmp_path / "run", total_steps=6, until=3, test_freq=3)
    with serving(path) as server, browser() as chromium:
        chromium.open(server.address, width=360)
        chromium.ask("document.querySelectorAll('#curves details, #notes details').forEach(each => each.open = true)")
        chromium.ask("window.before = document.getElementById('browse')")
        with (path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 4, "reward/mean": 0.25, "time/step": 1.0}) + "\n")
        chromium.until("document.getElementById('head').textContent.includes('step 4 of 6')")
        last = "JSON.parse(document.querySelector('svg[aria-label=Reward]').dataset.hover).rows.at(-1)"
        assert chromium.ask(last)[:2] == [4, 4] and chromium.ask(last)[2].startswith("0.250")
        opened = "[...document.querySelectorAll('#curves details, #notes details')].every(each => each.open)"
        assert chromium.ask(opened), "a fold stays open, also in a section that has changed"
        assert chromium.ask("document.getElementById('browse') === window.before"), (
            "what has not changed is not touched"
        )
        assert "Live" in chromium.ask("document.getElementById('live').textContent")
        foreign = [url for url in chromium.requests() if not url.startswith(server.address)]
        assert foreign == [] and chromium.complaints() == []
        server.shutdown()
        server.server_close()
        chromium.until("document.getElementById('live').textContent.startsWith('Not live')")
