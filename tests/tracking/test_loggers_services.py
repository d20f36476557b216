"""mlflow, swanlab and trackio are told a run: the real packages (tests/oracles.txt), and stand-ins everywhere.

The stand-ins have the signatures of the functions that are called, taken from mlflow 3.17, swanlab 0.6.4 and trackio
0.43, so that a misspelt argument fails; what a service makes of it, only the real ones show.
"""

from __future__ import annotations

import io
import json
import sqlite3
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mcore_rl.config.trainer import Logger, TrainerConfig
from mcore_rl.tracking.sinks import Tracker
from tests.support.oracles import oracles

SERVICES = (Logger.mlflow, Logger.swanlab, Logger.trackio)
CONFIG = {"actor": {"optim": {"lr": 1e-6}}, "many": {f"key_{number}": "x" * 7000 for number in range(120)}}


@pytest.fixture
def installed(alone: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The packages themselves."""
    # It asks for its folder when it is imported, and TRL imports it.
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)
    with oracles("mlflow, swanlab and trackio"):
        yield


def tell(run: Path, logger: Logger, *steps: int, resumed: int | None = None) -> None:
    trainer = TrainerConfig(project_name="words", experiment_name="first", logger=[logger], log_val_generations=2)
    with Tracker.open(run, trainer, CONFIG, 9, Console(file=io.StringIO()), resumed_step=resumed) as tracker:
        for step in steps:
            rows = [{"prompt": f"p{number}", "score": float(number)} for number in range(5)]
            tracker.samples(step, "validation", partial(list, rows))
            tracker.samples(step, "rollouts", partial(list, rows))
            tracker.log(step, {"reward/mean": step / 4, "val/a & b/accuracy": 0.5})


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.mark.usefixtures("installed")
@pytest.mark.tier("full")
@pytest.mark.filterwarnings("ignore")  # of classes that the process which reports them cannot import
def test_mlflow_keeps_the_run_and_goes_on_with_it(tmp_path: Path) -> None:
    tell(tmp_path / "run", Logger.mlflow, 0, 1)
    tell(tmp_path / "run", Logger.mlflow, 2, resumed=1)
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/run/logs/mlflow.db")
    experiment = client.get_experiment_by_name("words")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.info.run_id == (tmp_path / "run/logs/mlflow_id").read_text().strip()
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(each.step, each.value) for each in history] == [(0, 0.0), (1, 0.25), (2, 0.5)]
    assert run.data.metrics["val/a _ b/accuracy"] == 0.5
    assert run.data.params["actor.optim.lr"] == "1e-06" and len(run.data.params) == 121
    texts = [path.read_text() for path in (tmp_path / "run/logs/mlflow").rglob("step_1.md")]
    assert len(texts) == 1 and "p1" in texts[0] and "p2" not in texts[0]
    tell(tmp_path / "run", Logger.mlflow, 0)
    assert len(client.search_runs([experiment.experiment_id])) == 2, "a fresh run is another one"


@pytest.mark.usefixtures("installed")
@pytest.mark.tier("full")
def test_trackio_keeps_the_run_and_goes_on_with_it(tmp_path: Path) -> None:
    tell(tmp_path / "run", Logger.trackio, 0, 1)
    tell(tmp_path / "run", Logger.trackio, 2, resumed=1)
    with sqlite3.connect(tmp_path / "trackio" / "words.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by step, id").fetchall()
    values = [(name, step, json.loads(metrics)) for name, step, metrics in rows]
    numbers = [(name, step, each["reward/mean"]) for name, step, each in values if "reward/mean" in each]
    assert numbers == [("first", 0, 0.0), ("first", 1, 0.25), ("first", 2, 0.5)]
    samples = [json.dumps(each) for _, _, each in values if "validation/samples" in each]
    assert len(samples) == 3 and all("p1" in text and "p2" not in text for text in samples)


@pytest.mark.usefixtures("installed")
@pytest.mark.tier("full")
def test_swanlab_keeps_the_run(tmp_path: Path) -> None:
    tell(tmp_path / "run", Logger.swanlab, 0, 1)
    kept = b"".join(path.read_bytes() for path in (tmp_path / "run/logs/swanlab").rglob("*") if path.is_file())
    for text in (b"reward/mean", b"words", b"first", b"p1"):
        assert text in kept
    assert b"p2" not in kept


class Calls(list[tuple[str, dict[str, Any]]]):
    """What a stand-in was called with, by its name and its arguments' names."""

    def of(self, name: str) -> list[dict[str, Any]]:
        return [given for called, given in self if called == name]

    def recording(self, name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        """A function with the signature of ``answer``, which it calls."""
        import inspect

        signature = inspect.signature(answer)

        def called(*args: Any, **given: Any) -> Any:
            bound = signature.bind(*args, **given)
            self.append((name, dict(bound.arguments)))
            return answer(*args, **given)

        return called


def mlflow_stand_in(calls: Calls) -> dict[str, types.ModuleType]:
    run = types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))
    operations = types.SimpleNamespace(wait=lambda: calls.append(("wait", {})))
    functions = {
        "get_experiment_by_name": lambda name: None,
        "create_experiment": lambda name, artifact_location=None, tags=None: "e1",
        "create_run": lambda experiment_id, start_time=None, tags=None, run_name=None: run,
        "update_run": lambda run_id, status=None, name=None: None,
        "log_batch": lambda run_id, metrics=(), params=(), tags=(), synchronous=None: operations,
        "log_text": lambda run_id, text, artifact_file: None,
        "set_terminated": lambda run_id, status=None, end_time=None: None,
    }
    client = types.SimpleNamespace(**{name: calls.recording(name, answer) for name, answer in functions.items()})
    module, entities = types.ModuleType("mlflow"), types.ModuleType("mlflow.entities")
    made = calls.recording("MlflowClient", lambda tracking_uri=None, registry_uri=None: client)
    variable = types.SimpleNamespace(MLFLOW_TRACKING_URI=types.SimpleNamespace(is_set=lambda: False))
    module.__dict__.update(MlflowClient=made, environment_variables=variable)
    entities.__dict__.update(
        Metric=lambda key, value, timestamp, step: (key, value, step), Param=lambda key, value: (key, value)
    )
    return {"mlflow": module, "mlflow.entities": entities}


def swanlab_stand_in(calls: Calls) -> dict[str, types.ModuleType]:
    def init(
        project=None, workspace=None, experiment_name=None, description=None, tags=None, config=None, logdir=None,
        mode=None, load=None, public=None, callbacks=None, settings=None,
    ):  # fmt: skip
        return None

    module = types.ModuleType("swanlab")
    functions = {"init": init, "log": lambda data, step=None: None, "finish": lambda state="success", error=None: None}
    module.__dict__.update({name: calls.recording(name, answer) for name, answer in functions.items()})
    module.__dict__["Text"] = lambda data, caption=None: data
    return {"swanlab": module}


def trackio_stand_in(calls: Calls) -> dict[str, types.ModuleType]:
    def init(
        project, name=None, group=None, space_id=None, server_url=None, dataset_id=None, bucket_id=None, config=None,
        resume="never", settings=None, private=None, embed=True, auto_log_gpu=None, gpu_log_interval=10.0,
    ):  # fmt: skip
        return None

    module = types.ModuleType("trackio")
    functions = {"init": init, "log": lambda metrics, step=None: None, "finish": lambda: None}
    module.__dict__.update({name: calls.recording(name, answer) for name, answer in functions.items()})
    module.__dict__["Markdown"] = lambda text="": text
    return {"trackio": module}


STAND_INS = {Logger.mlflow: mlflow_stand_in, Logger.swanlab: swanlab_stand_in, Logger.trackio: trackio_stand_in}


@pytest.fixture
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Calls:
    recorded, logger = Calls(), request.getfixturevalue("logger")
    for name, module in STAND_INS[logger](recorded).items():
        module.__spec__ = types.SimpleNamespace(name=name)  # type: ignore[assignment]  # what find_spec looks for
        monkeypatch.setitem(sys.modules, name, module)
    return recorded


@pytest.mark.parametrize("logger", SERVICES)
def test_a_service_is_told_the_run(logger: Logger, calls: Calls, tmp_path: Path) -> None:
    tell(tmp_path / "run", logger, 0, 1)
    if logger is Logger.mlflow:
        numbers = [(given["metrics"], given["synchronous"]) for given in calls.of("log_batch") if "metrics" in given]
        assert numbers == [
            ([("reward/mean", step / 4, step), ("val/a _ b/accuracy", 0.5, step)], False) for step in (0, 1)
        ]
        batches = [given["params"] for given in calls.of("log_batch") if "params" in given]
        assert [len(batch) for batch in batches] == [100, 21] and max(len(text) for _, text in batches[0]) == 6000
        texts = [given["text"] for given in calls.of("log_text")]
        assert calls[-2:] == [("wait", {}), ("set_terminated", {"run_id": "r1"})]
    else:
        key = "data" if logger is Logger.swanlab else "metrics"
        said = [(given["step"], given[key]) for given in calls.of("log")]
        assert [each for each in said if "reward/mean" in each[1]] == [
            (step, {"reward/mean": step / 4, "val/a & b/accuracy": 0.5}) for step in (0, 1)
        ]
        texts = ["".join(each["validation/samples"]) for _, each in said if "validation/samples" in each]
        (begun,) = calls.of("init")
        assert begun["project"] == "words" and begun["config"]["actor"] == CONFIG["actor"]
        assert calls[-1][0] == "finish"
    assert len(texts) == 2 and all("p1" in text and "p2" not in text for text in texts)


@pytest.mark.parametrize("logger", SERVICES)
def test_a_resumed_run_goes_on_as_the_same_run_of_the_service(logger: Logger, calls: Calls, tmp_path: Path) -> None:
    tell(tmp_path / "run", logger, 0)
    calls.clear()
    tell(tmp_path / "run", logger, 1, resumed=0)
    if logger is Logger.mlflow:
        assert calls.of("update_run") == [{"run_id": "r1", "status": "RUNNING"}] and not calls.of("create_run")
    if logger is Logger.trackio:
        assert [(each["name"], each["resume"]) for each in calls.of("init")] == [("first", "allow")]
    assert (tmp_path / "run" / "logs" / f"{logger.value}_id").is_file()
