"""Metrics are asked for as Prometheus does, and read with its own parser; the dashboard asks for those there are."""

from __future__ import annotations

import json
import re
import socket
import time
from collections import Counter
from contextlib import ExitStack, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mcore_rl.config.trainer import PrometheusConfig, TrainerConfig
from mcore_rl.ground.errors import ConfigError
from mcore_rl.tracking import prometheus_sink
from mcore_rl.tracking.metrics import METRICS
from mcore_rl.tracking.prometheus_sink import exposed_metrics, exposed_name
from mcore_rl.tracking.sinks import Tracker
from tests.house.source import ROOT

DASHBOARD = json.loads((ROOT / "docs" / "grafana.json").read_text(encoding="utf-8"))


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as asked:
        asked.bind((host, 0))
        return int(asked.getsockname()[1])


def trainer(port: int, host: str = "127.0.0.1") -> TrainerConfig:
    return TrainerConfig(experiment_name="mine", logger=[], prometheus=PrometheusConfig(port=port, host=host))


def asked(port: int, path: str = "/metrics", token: str = "") -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """(name, labels) -> value of each sample that is served."""
    request = Request(f"http://127.0.0.1:{port}{path}", headers={"Authorization": f"Bearer {token}"} if token else {})
    with urlopen(request, timeout=60) as answer:
        text = answer.read().decode()
    return {
        (each.name, frozenset(each.labels.items())): each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
    }


def refusal(port: int, path: str = "/metrics", token: str = "") -> int:
    with pytest.raises(HTTPError) as caught:
        asked(port, path, token)
    return caught.value.code


def test_the_newest_step_is_served_and_the_last_validation_stays(tmp_path: Path) -> None:
    port = free_port()
    with Tracker.open(tmp_path, trainer(port), {}, 40) as tracker:
        assert asked(port)["mcore_rl_step", frozenset({("run", "mine")})] == 0
        tracker.log(1, {"reward/mean": 0.5, 'val/a "b"/c/accuracy': 0.25, "dropped/groups": 3, "time/step": 2})
        tracker.log(2, {"reward/mean": -0.125, "reward/part/form": 1, "actor/lr": 1e-6})
        served = asked(port)
        ended = served.pop(("mcore_rl_last_step_timestamp_seconds", frozenset({("run", "mine")})))
        assert ended > 1.7e9
        assert {(name, *sorted(labels - {("run", "mine")})): value for (name, labels), value in served.items()} == {
            ("mcore_rl_step",): 2, ("mcore_rl_total_steps",): 40, ("mcore_rl_reward_mean",): -0.125,
            ("mcore_rl_val_accuracy", ("data_source", 'a "b"/c')): 0.25, ("mcore_rl_actor_lr",): 1e-6,
            ("mcore_rl_reward_part", ("name", "form")): 1,
        }  # fmt: skip
        assert all(("run", "mine") in labels for _, labels in served)
        assert refusal(port, "/") == refusal(port, "/metrics/x") == 404
    with pytest.raises(OSError, match="refused"):
        asked(port)
    assert not (tmp_path / "prometheus_token").exists()


def test_beyond_this_machine_the_secret_of_the_run_is_demanded(tmp_path: Path) -> None:
    port, config = free_port(), {"trainer": {"experiment_name": "mine"}}
    tokens = set()
    for resumed in (None, 0):
        with Tracker.open(tmp_path, trainer(port, "0.0.0.0"), config, 2, resumed_step=resumed):
            token = (tmp_path / "prometheus_token").read_text()
            tokens.add(token)
            assert [refusal(port, token=each) for each in ("", "wrong", token[:-1])] == [401] * 3
            assert refusal(port, "/", token) == 404 and asked(port, token=token)
    assert len(tokens) == 1 and len(token) > 40, "who goes on has the same"
    assert (tmp_path / "prometheus_token").stat().st_mode & 0o777 == 0o600
    others = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "prometheus_token"]
    assert others and not any(token.encode() in path.read_bytes() for path in others)


def test_an_empty_secret_lets_nobody_in_and_one_that_cannot_be_kept_is_told(tmp_path: Path) -> None:
    port, file = free_port(), tmp_path / "prometheus_token"
    for left in ("", "\n"):  # of a run that was killed, or met a full disk
        file.write_text(left)
        with Tracker.open(tmp_path, trainer(port, "0.0.0.0"), {}, 2):
            assert file.stat().st_mode & 0o777 == 0o600 and len(file.read_text()) > 40
            assert refusal(port) == refusal(port, token=" ") == 401 and asked(port, token=file.read_text())
    file.unlink()
    file.mkdir()
    with pytest.raises(ConfigError) as caught:
        Tracker.open(tmp_path, trainer(port, "0.0.0.0"), {}, 2)
    (told,) = caught.value.violations
    assert str(told).startswith(f"trainer.prometheus.host=0.0.0.0: demands a secret of who asks, and {file} cannot be")


def test_a_run_that_begins_or_goes_on_does_not_stand_still(tmp_path: Path) -> None:
    port, run = free_port(), frozenset({("run", "mine")})
    for resumed in (None, 30):
        begun = time.time()
        with Tracker.open(tmp_path, trainer(port), {}, 40, resumed_step=resumed) as tracker:
            served = asked(port)
            assert begun <= served["mcore_rl_last_step_timestamp_seconds", run] <= time.time()
            assert served["mcore_rl_step", run] == (resumed or 0)
            tracker.log(31, {"reward/mean": 1})
            assert asked(port)["mcore_rl_step", run] == 31


def is_cut(connection: socket.socket) -> bool:
    """Whether the other side ends a connection to which a byte is sent now and then."""
    connection.settimeout(0.1)
    for _ in range(300):
        with suppress(TimeoutError):
            try:
                connection.send(b"x")
                if not connection.recv(1):
                    return True
            except ConnectionError:
                return True
    return False


def test_strangers_hold_few_threads_and_not_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def limit_s(seconds: float) -> None:
        monkeypatch.setattr(prometheus_sink, "REQUEST_S", seconds)

    monkeypatch.setattr("mcore_rl.tracking.prometheus_sink._Handler.timeout", 3600.0)
    limit_s(3600.0)
    port = free_port()
    with Tracker.open(tmp_path, trainer(port), {}, 40), ExitStack() as closing:
        strangers = [
            closing.enter_context(socket.create_connection(("127.0.0.1", port)))
            for _ in range(prometheus_sink.MOST_OPEN + 1)
        ]
        assert is_cut(strangers[-1]), "one more than the bound"
        limit_s(0.0)
        assert is_cut(strangers[0]), "one that goes on to say something"
        limit_s(3600.0)
        assert until_answered(port)


def until_answered(port: int) -> bool:
    for _ in range(100):
        with suppress(OSError, HTTPException):
            return bool(asked(port))
        time.sleep(0.1)
    return False


def test_an_answer_names_no_version(tmp_path: Path) -> None:
    port = free_port()
    with Tracker.open(tmp_path, trainer(port), {}, 40):
        for method in ("GET", "POST"):
            connection = HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request(method, "/")
            answer = connection.getresponse()
            assert "ython" not in f"{answer.headers}{answer.read().decode()}"
            connection.close()


def test_a_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"trainer.prometheus.port={port}: nothing can listen at 127.0.0.1:{port}"
        ):
            Tracker.open(tmp_path, trainer(port), {}, 2)


def test_no_two_metrics_share_a_name() -> None:
    twice = [name for name, count in Counter(exposed_name(each.key) for each in METRICS).items() if count > 1]
    assert twice == [] and all(re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]", name) for name in exposed_metrics())
    assert exposed_name("{role}/{metric}") == "mcore_rl_role_metric"


def queries(value: Any) -> list[tuple[str, str]]:
    """(query, legend) of everything in a dashboard that asks Prometheus."""
    if isinstance(value, list):
        return [each for item in value for each in queries(item)]
    if not isinstance(value, dict):
        return []
    own = [(str(value["expr"]), str(value.get("legendFormat", "")))] if "expr" in value else []
    own += [(value["query"], "")] if isinstance(value.get("query"), str) and "(" in value["query"] else []
    return own + [each for item in value.values() for each in queries(item)]


def test_every_query_of_the_dashboard_names_metrics_and_labels_that_there_are() -> None:
    known, asked_for = exposed_metrics(), queries(DASHBOARD)
    assert len(asked_for) > 30
    for query, legend in asked_for:
        names = re.findall(r"mcore_rl_\w+", query)
        labels = {*re.findall(r"(\w+)=~?\"", query), *re.findall(r"{{(\w+)}}", legend)}
        assert names and {*names} <= known.keys(), query
        assert all(labels <= {*known[name]} for name in names), (query, legend)


def test_the_dashboard_has_a_place_for_every_panel() -> None:
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    cells = [
        (x, y) for at in places for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len({*cells}) and max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)
