"""TensorBoard and Weights & Biases get each point once, whoever dies when."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import types

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from steadytrain.components.observe.tensorboard_sink import TensorBoardDelivery, TensorBoardSink
from steadytrain.components.observe.wandb_sink import WandbDelivery, WandbSink
from steadytrain.components.report.step import send_unsent
from steadytrain.components.shared import plugins
from steadytrain.components.shared.errors import BadInput, ConfigError, TrackingError
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import (
    LayersCounted,
    NoiseScaleMeasured,
    TrainingStep,
    Validated,
)
from steadytrain.components.shared.tracking import notes as spool_module
from steadytrain.components.shared.workspace import Workspace
from steadytrain.pipelines.early_checks import check_plugins

from support.snippets import blocks
from support.wandb_files import rows
from support.written_run import Writer


def curves(workspace):
    """Return TensorBoard's points by attempt and name, as TensorBoard itself reads them."""
    found = {}
    for folder in sorted((workspace.folder / "tensorboard").iterdir()):
        read = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
        attempt = int(folder.name.removeprefix("attempt-"))
        for name in read.Tags()["scalars"]:
            found[attempt, name] = [(point.step, point.value) for point in read.Scalars(name)]
    return found


def expected(workspace, name="loss"):
    """Return the steps and values of a curve, by attempt."""
    steps = {}
    for event in read_events(workspace.events):
        if isinstance(event, TrainingStep):
            steps.setdefault((event.attempt, name), []).append(event.step)
    return steps


def check_curves(workspace):
    found = curves(workspace)
    for key, steps in expected(workspace).items():
        assert [step for step, _ in found[key]] == steps
    validations = [item for item in read_events(workspace.events) if isinstance(item, Validated)]
    assert sum(len(found[attempt, "eval_loss"]) for attempt in (1, 2, 3)) == len(validations)


def test_tensorboard_reads_each_point_of_each_attempt(written):
    for _ in range(2):
        sink = TensorBoardSink(
            written.config, written.workspace, batch_seconds=0.05, close_seconds=300
        )
        sink.close()
        check_curves(written.workspace)


@pytest.mark.parametrize("batch", [1, 7, 1000])
def test_process_that_dies_before_its_note_leaves_no_point_twice(written, monkeypatch, batch):
    monkeypatch.setattr(spool_module, "BATCH_EVENTS", batch)
    delivery, asked = TensorBoardDelivery(written.workspace), iter(range(3))
    delivery.catch_up(give_up=lambda: next(asked, None) is None)
    note = written.workspace.tracking / "tensorboard"
    before = note.read_text()
    delivery.catch_up()
    note.write_text(before)
    # And in the middle of a record.
    (file,) = (written.workspace.folder / "tensorboard/attempt-1").iterdir()
    file.write_bytes(file.read_bytes() + b"torn")
    tracking = written.config.tracking.model_copy(update={"sinks": ["tensorboard"]})
    assert send_unsent(written.config.model_copy(update={"tracking": tracking}), written.workspace)
    check_curves(written.workspace)


def test_damaged_note_writes_everything_again(written):
    TensorBoardDelivery(written.workspace).catch_up()
    (written.workspace.tracking / "tensorboard").write_text("{damaged")
    TensorBoardDelivery(written.workspace).catch_up()
    check_curves(written.workspace)


def test_file_that_cannot_be_written_is_named(written):
    (written.workspace.folder / "tensorboard").write_text("in the way")
    with pytest.raises(TrackingError, match="cannot be written"):
        TensorBoardDelivery(written.workspace).catch_up()


def measure_noise_scale(run):
    """Add a measurement at two reported steps, of which the first one has no value."""
    stream = run.workspace.stream("rank-1")  # files are merged by time
    for event in list(read_events(run.workspace.events)):
        if isinstance(event, TrainingStep) and event.attempt == 1 and event.step in (100, 200):
            size = 80.0 if event.step == 200 else None
            about = {"noise": 1.0, "signal": 0.1, "critical_batch_size": size}
            earlier = event.time - 0.01
            stream.emit(NoiseScaleMeasured(time=earlier, attempt=1, step=event.step, **about))
    stream.close()


def test_tensorboard_has_the_critical_batch_size(written):
    measure_noise_scale(written)
    TensorBoardDelivery(written.workspace).catch_up()
    assert curves(written.workspace)[1, "critical_batch_size"] == [(200, 80.0)]
    check_curves(written.workspace)


COUNTED = {"model.layers.0": [-2.0, 2.0, 1, 2, 3, 4], "lm_head": [0.5, 0.5, 0, 0, 0, 7]}


def count_layers(run):
    stream = run.workspace.stream("rank-1")
    about = {"gradient": {"lm_head": [-1.0, 1.0, 2, 2]}, "weight": COUNTED}
    (one,) = (
        event
        for event in read_events(run.workspace.events)
        if isinstance(event, TrainingStep) and (event.attempt, event.step) == (1, 200)
    )
    stream.emit(LayersCounted(time=one.time - 0.02, attempt=1, step=200, **about))
    stream.close()


def test_tensorboard_has_the_histograms_of_each_layer(written):
    count_layers(written)
    TensorBoardDelivery(written.workspace).catch_up()
    read = EventAccumulator(str(written.workspace.folder / "tensorboard/attempt-1")).Reload()
    assert sorted(read.Tags()["histograms"]) == [
        "gradients/lm_head",
        "weights/lm_head",
        "weights/model.layers.0",
    ]
    (shown,) = read.Histograms("weights/model.layers.0")
    assert shown.step == 200
    found = shown.histogram_value
    assert (found.min, found.max, found.num) == (-2.0, 2.0, 10)
    assert (found.bucket_limit, found.bucket) == ([-1.0, 0.0, 1.0, 2.0], [1, 2, 3, 4])
    check_curves(written.workspace)


DIES = """
import itertools, os, signal, sys
from steadytrain.components.observe import wandb_sink
from steadytrain.components.shared.config import load
from steadytrain.components.shared.workspace import Workspace
shown_at, counted = wandb_sink.shown_at, itertools.count()
def die_at_the_thirtieth(event):
    if next(counted) == 30:
        os.kill(os.getpid(), signal.SIGKILL)
    return shown_at(event)
wandb_sink.shown_at = die_at_the_thirtieth
config = load(sys.argv[1])
wandb_sink.WandbDelivery(config, Workspace.of(config)).catch_up()
"""


@pytest.mark.slow
def test_offline_attempts_are_written_whole_and_once(written):
    """The first process is killed in the second attempt; the note of the second one is lost."""
    folder = written.workspace.folder / "wandb"
    count_layers(written)
    first = subprocess.run([sys.executable, "-c", DIES, written.config.to_yaml()])
    assert first.returncode == -signal.SIGKILL
    assert {path.name for path in folder.iterdir()} == {"attempt-1", ".attempt-2"}
    sink = WandbSink(written.config, written.workspace, batch_seconds=0.05, close_seconds=300)
    sink.close()
    (written.workspace.tracking / "wandb/told").unlink()
    WandbDelivery(written.config, written.workspace).catch_up()
    assert {path.name for path in folder.iterdir()} == {"attempt-1", "attempt-2", "attempt-3"}
    for (attempt, _), steps in expected(written.workspace).items():
        (file,) = (folder / f"attempt-{attempt}").rglob("*.wandb")
        found = rows(file)
        assert [row["step"] for row in found if "loss" in row] == steps
        assert any("eval_loss" in row for row in found)
    (file,) = (folder / "attempt-1").rglob("*.wandb")
    assert b"gpu_oom" in file.read_bytes()
    (counted,) = (row for row in rows(file) if "weights/model.layers.0" in row)
    shown = {"_type": "histogram", "values": [1, 2, 3, 4], "bins": [-2.0, -1.0, 0.0, 1.0, 2.0]}
    assert (counted["step"], counted["weights/model.layers.0"]) == (200, shown)
    assert counted["gradients/lm_head"]["values"] == [2, 2]


class Service:
    """Weights & Biases itself, which cannot run here: it ignores numbers that it already has."""

    def __init__(self):
        self.rows = {}
        self.fails = False

    def init(self, **options):
        if self.fails:
            raise ConnectionError("api_key canary-0123456789 refused")
        run = types.SimpleNamespace(summary={}, finish=lambda exit_code=0: None)
        rows = self.rows.setdefault(options["id"], {})
        assert options["mode"] == "online"

        def log(row, step):
            if not rows or step > max(rows):
                rows[step] = row

        run.log, run.define_metric = log, lambda *_, **__: None
        return run


@pytest.fixture
def service(monkeypatch):
    made = Service()
    module = types.SimpleNamespace(init=made.init, Settings=lambda **options: options)
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setenv("WANDB_API_KEY", "canary-0123456789")
    return made


def test_with_a_key_points_that_come_again_are_ignored(written, service, monkeypatch):
    monkeypatch.setattr(spool_module, "BATCH_EVENTS", 9)
    first, asked = WandbDelivery(written.config, written.workspace), iter(range(3))
    first.catch_up(give_up=lambda: next(asked, None) is None)
    told = written.workspace.tracking / "wandb/told"
    before = told.read_text()
    first.catch_up(give_up=iter([False, True]).__next__)
    told.write_text(before)
    WandbDelivery(written.config, written.workspace).catch_up()
    assert len(service.rows) == 3
    for (attempt, _), steps in expected(written.workspace).items():
        (rows,) = (rows for run, rows in service.rows.items() if run.endswith(f"-{attempt}"))
        assert [row["step"] for row in rows.values() if "loss" in row] == steps
        assert any("eval_loss" in row for row in rows.values())


def test_wandb_has_the_critical_batch_size_and_every_other_point_of_its_step(written, service):
    measure_noise_scale(written)
    WandbDelivery(written.config, written.workspace).catch_up()
    (rows,) = (rows for run, rows in service.rows.items() if run.endswith("-1"))
    found = [row for row in rows.values() if row["step"] == 200]
    assert [row.get("critical_batch_size") for row in found] == [80.0, None, None]
    assert "loss" in found[1]
    assert "eval_loss" in found[2]
    assert [row["step"] for row in rows.values() if "loss" in row] == expected(written.workspace)[
        1, "loss"
    ]


def test_failure_is_an_error_without_the_key(written, service):
    service.fails = True
    with pytest.raises(TrackingError, match="redacted") as raised:
        WandbDelivery(written.config, written.workspace).catch_up()
    assert "canary" not in str(raised.value)
    service.fails = False
    WandbDelivery(written.config, written.workspace).catch_up()
    assert len(service.rows) == 3


@pytest.mark.slow
def test_secrets_are_in_nothing_that_is_written(make_config, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "canary-0123456789")
    run = Writer(make_config())
    ending = {"failure_class": "user_bug", "message": "token canary-0123456789 rejected"}
    run.attempt(1, last=10, max_steps=500, outcome="failed", **ending)
    TensorBoardDelivery(run.workspace).catch_up()
    WandbDelivery(run.config, run.workspace).catch_up()
    written = [
        path
        for name in ("wandb", "tensorboard")
        for path in (run.workspace.folder / name).rglob("*")
        if path.is_file()
    ]
    assert len(written) > 2
    assert [path for path in written if b"canary" in path.read_bytes()] == []


def test_documented_sink_writes_each_score_once(written):
    (code,) = (block.text for block in blocks("python") if "class ScoreSink" in block.text)
    names = {"__name__": "snippet"}
    exec(compile(code, "docs/extending.md", "exec", dont_inherit=True), names)
    for _ in range(2):
        names["ScoreSink"](written.config, written.workspace).close()
    steps = [
        event.step for event in read_events(written.workspace.events) if type(event) is Validated
    ]
    lines = (written.workspace.folder / "scores.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == steps


@pytest.mark.parametrize("name", ["otlp", "tensorboard", "wandb"])
def test_missing_package_names_the_extra_before_a_run_starts(make_config, monkeypatch, name):
    config = make_config(tracking={"sinks": [name]})
    check_plugins(config)
    monkeypatch.setattr(
        "steadytrain.components.shared.tracking.pull_sink.find_spec", lambda package: None
    )
    extra = {"otlp": "data"}.get(name, name)
    with pytest.raises(ConfigError, match=rf"steadytrain\[{extra}\]") as raised:
        check_plugins(config)
    assert "tracking.sinks" in str(raised.value)
    with pytest.raises(BadInput, match="not installed"):
        plugins.load(plugins.SINKS, name)(config, Workspace.of(config))
