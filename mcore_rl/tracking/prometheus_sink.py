"""The newest step's metrics at an address that Prometheus asks: ``trainer.prometheus``.

A metric ``reward/mean`` is ``mcore_rl_reward_mean``; what a family's placeholders stand for are labels:
``val/{data_source}/accuracy`` is ``mcore_rl_val_accuracy{data_source="..."}``.  Every one has the label ``run``.

Numbers alone are served.  On another address than the loopback one, who asks needs the secret of the run.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from hmac import compare_digest
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from socket import AF_INET, AF_INET6, SHUT_RDWR
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from mcore_rl.config.trainer import TrainerConfig
from mcore_rl.ground.errors import ConfigError, Violation
from mcore_rl.ground.secrets import redact
from mcore_rl.tracking.atomic import replaced
from mcore_rl.tracking.loggers import Sink
from mcore_rl.tracking.metrics import METRICS, matched

PATH = "/metrics"
HOST = "trainer.prometheus.host"
TOKEN = "prometheus_token"  # file of the run directory
PREFIX = "mcore_rl_"
STEP = f"{PREFIX}step"
TOTAL = f"{PREFIX}total_steps"
TIME = f"{PREFIX}last_step_timestamp_seconds"
OWN = {
    STEP: "the last step that is complete",
    TOTAL: "steps of the whole run",
    TIME: "when that step ended, or serving began, unix time",
}
REQUEST_S = 10.0  # for a whole request, and its answer
MOST_OPEN = 8  # connections; each is a thread, before anybody knows who asks
_PLACE = re.compile(r"\{(\w+)\}")


def exposed_name(key: str) -> str:
    """What Prometheus calls a row of ``metrics.METRICS``."""
    labels = labels_of(key)
    own = re.sub(r"[\W_]+", "_", _PLACE.sub("", key)).strip("_")
    name = PREFIX + (own or "_".join(labels))
    return f"{name}_by_{'_'.join(labels)}" if labels and name in _names_without_labels() else name


@cache
def _names_without_labels() -> frozenset[str]:
    """A family may be beside the metric of all: ``distill/reverse_kl/{data_source}`` beside ``distill/reverse_kl``."""
    return frozenset(exposed_name(each.key) for each in METRICS if not labels_of(each.key))


def labels_of(key: str) -> list[str]:
    """The labels of a row of ``metrics.METRICS``, without ``run``."""
    return _PLACE.findall(key)


def exposed_metrics() -> dict[str, list[str]]:
    """The labels of each metric that may be served, by its name there."""
    return {exposed_name(each.key): ["run", *labels_of(each.key)] for each in METRICS} | {name: ["run"] for name in OWN}


class _Newest(Collector):
    """Metrics of the newest step, as Prometheus collects them.  run: what it is called.  step: the last before it."""

    def __init__(self, run: str, step: int, total_steps: int) -> None:
        self._run = run
        self._total = total_steps
        self._numbers: dict[str, float] = {}
        self._step = step
        self._ended = time.time()

    def take(self, step: int, metrics: Mapping[str, float]) -> None:
        """A validation's numbers stay until the next one; others are those of the step alone."""
        kept = {key: value for key, value in self._numbers.items() if key.startswith("val/")}
        self._step = step
        self._ended = time.time()
        self._numbers = kept | dict(metrics)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """What is served now, a family for each metric."""
        families: dict[str, GaugeMetricFamily] = {}
        for key, value in self._numbers.items():
            row, places = matched(key)
            name = exposed_name(row.key)
            if name not in families:
                families[name] = GaugeMetricFamily(name, f"{row.help} ({row.unit})", labels=["run", *places])
            families[name].add_metric([self._run, *places.values()], value)
        yield from families.values()
        for name, value in {STEP: self._step, TOTAL: self._total, TIME: self._ended}.items():
            family = GaugeMetricFamily(name, OWN[name], labels=["run"])
            family.add_metric([self._run], value)
            yield family


class PrometheusSink(Sink):
    """Serves from its making on.  OSError: the address or the port cannot be had.  ConfigError: the secret cannot."""

    name = "prometheus"

    def __init__(self, run_dir: Path, trainer: TrainerConfig, step: int, total_steps: int) -> None:
        self._newest = _Newest(redact(trainer.experiment_name), step, total_steps)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self._newest)
        host = trainer.prometheus.host
        port = trainer.prometheus.port
        assert port is not None
        token = None if ip_address(host).is_loopback else _token(run_dir / TOKEN, host)
        self._server = _Server(host, port, registry, token)
        threading.Thread(target=self._server.serve_forever, name=self.name, daemon=True).start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Serve the step's metrics from now on."""
        self._newest.take(step, metrics)

    def close(self) -> None:
        """End the server."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    """token: what a request must bring; None: nothing."""

    daemon_threads = True

    def __init__(self, host: str, port: int, registry: CollectorRegistry, token: str | None) -> None:
        self.registry = registry
        self.token = token
        self.address_family = AF_INET6 if isinstance(ip_address(host), IPv6Address) else AF_INET
        self._begun = dict[Any, float]()  # open connection -> when it came
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers in a thread, if not too many are open."""
        if len(self._begun) == MOST_OPEN:
            self.shutdown_request(request)
            return
        self._begun[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Ends a connection; each one ends here."""
        super().shutdown_request(request)
        self._begun.pop(request, None)

    def service_actions(self) -> None:
        """Cuts, between two looks for clients, those that took too long, also if they say a byte now and then."""
        for request, begun in [*self._begun.items()]:
            if time.monotonic() > begun + REQUEST_S:
                with suppress(OSError):  # it has just ended
                    request.shutdown(SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of clients that leave."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "mcore-rl"
    sys_version = ""
    timeout = REQUEST_S  # for one that outlives the server

    def log_message(self, *_: object) -> None:
        """Says nothing on standard error."""

    def do_GET(self) -> None:
        """Answer the one path there is."""
        token = self.server.token
        given = self.headers.get("Authorization") or ""
        if token is not None and not compare_digest(given.encode(), f"Bearer {token}".encode()):
            return self._answer(401, b"", {"WWW-Authenticate": "Bearer"})
        if self.path.partition("?")[0] != PATH:
            return self._answer(404, b"", {})
        return self._answer(200, generate_latest(self.server.registry), {"Content-Type": CONTENT_TYPE_LATEST})

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def _token(path: Path, host: str) -> str:
    """The secret of a run, made once: who goes on with the run need not tell Prometheus another.

    Raises ConfigError where its file cannot be read or written.
    """
    try:
        token = path.read_text(encoding="utf-8").strip() if path.exists() else ""
        if not token:  # else the file of a run that was killed would let everybody in
            token = secrets.token_urlsafe(32)
            _write_secret(path, token)
        path.chmod(0o600)
        return token
    except (OSError, ValueError) as error:
        problem = f"demands a secret of who asks, and {path} cannot be kept: {error}"
        remedy = f"Remove that file, or leave {HOST} out to listen on this machine alone"
        raise ConfigError([Violation(HOST, host, problem, remedy)]) from error


def _write_secret(path: Path, secret: str) -> None:
    with replaced(path) as new:
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(secret)
