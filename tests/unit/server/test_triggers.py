"""New data starts one run, whoever asks and whatever is killed. A watcher waits for quiet."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import BadInput, ServerError, StorageError
from steadytrain.components.shared.kubeflow.connection import connect
from steadytrain.pipelines import cli
from steadytrain.pipelines.server import triggers
from steadytrain.pipelines.server.submission import Submission
from steadytrain.pipelines.server.triggers import Trigger, trigger, watch

from support.command import wait_for
from support.hostile_server import answering, saying
from support.s3 import mocked_s3


@pytest.fixture(autouse=True)
def compiled(request):
    """Stub out compilation, which takes a second and has its own tests."""
    content = {
        "pipelineInfo": {"name": "steadytrain-retrain"},
        "root": {
            "inputDefinitions": {
                "parameters": {name: {"parameterType": "STRING"} for name in ("config", "output")}
            }
        },
    }

    def compile_pipeline(path, pipeline, shape):
        path.write_text(yaml.safe_dump(content))
        return path

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triggers, "compile_pipeline", compile_pipeline)
        yield


@pytest.fixture
def what(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("a")
    return made(tmp_path / "data", tmp_path)


def made(source, output, **options):
    content = {"name": "bot", "output": str(output), "data": {"source": [str(source)]}}
    content["model"] = {"base": "hub:m"}
    return Trigger.of(Submission.of(yaml.safe_dump(content)), "retrain", **options)


def add(what, name="b.txt"):
    Path(what.config.data.source[0], name).write_text(name)


def end_runs(kfp, state="SUCCEEDED"):
    for run in kfp.all("runs"):
        run["state"] = state


def test_held_out_data_are_watched_too(tmp_path, what):
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("a")
    data = what.config.data.model_copy(update={"test_source": [str(held_out)]})
    config = what.config.model_copy(update={"data": data})
    both = Trigger.of(replace(what.submission, config=config), what.pipeline)
    seen = both.seen()
    assert seen != what.seen()
    held_out.write_text("another")
    assert both.seen() != seen
    data = data.model_copy(update={"test_source": ["hub:x"]})
    config = config.model_copy(update={"data": data})
    with pytest.raises(BadInput, match=r"data\.test_source = 'hub:x'"):
        Trigger.of(replace(what.submission, config=config), what.pipeline)


def test_new_data_start_exactly_one_run(kfp, what):
    server = connect(kfp.address)
    first = trigger(server, what)
    assert first.kind == "started"
    (run,) = kfp.all("runs")
    assert (first.run, first.run_id) == (run["display_name"], run["run_id"])
    assert first.url in str(first)
    assert load(run["runtime_config"]["parameters"]["config"]).run_id == first.run
    for state in ("RUNNING", "CANCELED", "SUCCEEDED"):
        end_runs(kfp, state)
        assert trigger(server, what).kind == "known"
    assert len(kfp.all("runs")) == 1


def test_failed_run_is_started_again_for_its_data_with_the_reason(kfp, what, monkeypatch):
    monkeypatch.setattr(triggers, "_RETRY_SECONDS", (3600.0, 0.0))
    server = connect(kfp.address)
    first = trigger(server, what)
    for run in kfp.all("runs"):
        run |= {"state": "FAILED", "error": {"message": "the disk is full\nmore"}}

    waiting = trigger(server, what)
    assert (waiting.kind, waiting.settled, len(kfp.all("runs"))) == ("failed", False, 1)
    assert "the disk is full; it is started again after " in str(waiting)

    monkeypatch.setattr(triggers, "_RETRY_SECONDS", (0.0, 0.0))
    second = trigger(server, what)
    assert (second.kind, second.run) == ("started", first.run)
    assert "try 2 of 3, because it failed: the disk is full" in str(second)
    assert trigger(server, what).kind == "known"
    end_runs(kfp, "FAILED")
    assert trigger(server, what).kind == "started"
    end_runs(kfp, "FAILED")
    given_up = trigger(server, what)
    assert (given_up.kind, given_up.settled) == ("failed", True)
    assert "started 3 times and is not started again" in str(given_up)
    assert len(kfp.all("runs")) == 3
    add(what)
    assert trigger(server, what).kind == "started"


def test_only_one_run_is_active_at_a_time(kfp, what):
    server = connect(kfp.address)
    first = trigger(server, what)
    add(what)
    busy = trigger(server, what)
    assert (busy.kind, busy.run) == ("busy", first.run)
    end_runs(kfp, "FAILED")
    second = trigger(server, what)
    assert second.kind == "started"
    assert second.run != first.run
    assert len(kfp.all("runs")) == 2


def resubmitted(kfp, **changes):
    """Do what the exit handler does if a run lost a step: start another run of the same name."""
    (first,) = kfp.all("runs")
    kept = ("display_name", "experiment_id", "pipeline_version_reference", "runtime_config")
    made = kfp.create("runs", {key: first[key] for key in kept} | changes)
    first["state"], made["state"] = "FAILED", "RUNNING"
    return made


@pytest.mark.parametrize("name", ["", "Clone of {}", "Clone (2) of {}"])
@pytest.mark.parametrize("newest_first", [False, True])
def test_resubmitted_run_counts_as_active(kfp, what, name, newest_first):
    server = connect(kfp.address)
    first = trigger(server, what)
    second = resubmitted(kfp, **({"display_name": name.format(first.run)} if name else {}))
    if newest_first:
        kfp.things["runs"] = dict(reversed(kfp.things["runs"].items()))
    known = trigger(server, what)
    assert (known.kind, known.run_id) == ("known", second["run_id"])
    add(what)
    busy = trigger(server, what)
    assert (busy.kind, busy.run, busy.run_id) == ("busy", first.run, second["run_id"])
    assert len(kfp.all("runs")) == 2
    end_runs(kfp)
    assert trigger(server, what).kind == "started"


@pytest.mark.slow
def test_resubmitted_run_is_found_on_any_page(kfp, what):
    server = connect(kfp.address)
    first = trigger(server, what)
    resubmitted(kfp)
    (live,) = [run for run in kfp.all("runs") if run["state"] == "RUNNING"]
    earlier = {key: live[key] for key in live if key not in ("run_id", "state")}
    kfp.things["runs"] = {
        **{str(n): earlier | {"run_id": str(n), "state": "FAILED"} for n in range(30)},
        live["run_id"]: live,
    }
    add(what)
    assert (trigger(server, what).kind, len(kfp.all("runs"))) == ("busy", 31)
    assert first.run == live["display_name"]


def test_run_with_a_common_prefix_is_another_run(kfp, what):
    server = connect(kfp.address)
    trigger(server, what)
    (first,) = kfp.all("runs")
    first["state"] = "SUCCEEDED"
    other = f"{first['display_name']}-b"
    runtime = {"parameters": {"config": f"run: {other}"}}
    kfp.create(
        "runs",
        {key: first[key] for key in ("experiment_id", "pipeline_version_reference")}
        | {"display_name": other, "runtime_config": runtime},
    )
    add(what)
    assert trigger(server, what).kind == "started"


def test_concurrent_triggers_start_one_run(kfp, what):
    server = connect(kfp.address)
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: trigger(server, what).kind, range(6)))
    assert sorted(answers) == ["known"] * 5 + ["started"]
    assert len(kfp.all("runs")) == 1


def test_trigger_killed_after_the_start_causes_no_second_run(kfp, what, monkeypatch):
    server, start = connect(kfp.address), triggers.start

    def killed(*arguments):
        start(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(triggers, "start", killed)
    with pytest.raises(KeyboardInterrupt):
        trigger(server, what)
    monkeypatch.setattr(triggers, "start", start)
    assert trigger(server, what).kind == "known"
    assert len(kfp.all("runs")) == 1


def test_failed_start_is_retried(kfp, what):
    server = connect(kfp.address)
    kfp.fail_next = [("POST /apis/v2beta1/runs", 500)]
    with pytest.raises(ServerError, match="500"):
        trigger(server, what)
    assert trigger(server, what).kind == "started"
    assert len(kfp.all("runs")) == 1


def test_answer_without_an_id_starts_nothing_and_leaves_a_readable_state(kfp, what):
    """Some proxies answer {} with status 200 to anything."""
    with answering(saying(b"{}")) as address:
        for _ in range(2):
            with pytest.raises(ServerError, match=r"answers without .*_id"):
                trigger(connect(address), what)
    assert trigger(connect(kfp.address), what).kind == "started"
    assert trigger(connect(kfp.address), what).kind == "known"


def test_deleted_run_is_started_again(kfp, what):
    server = connect(kfp.address)
    trigger(server, what)
    kfp.things["runs"].clear()
    assert trigger(server, what).kind == "started"


@pytest.mark.long
def test_started_runs_are_recorded_on_s3(kfp, tmp_path, monkeypatch):
    with mocked_s3(monkeypatch) as client:
        client.put_object(Bucket="bucket", Key="data/a.txt", Body=b"a")
        what = made("s3://bucket/data", "/mnt/shared", state="s3://bucket/triggers")
        server = connect(kfp.address)
        assert trigger(server, what).kind == "started"
        assert trigger(server, what).kind == "known"
        end_runs(kfp)
        client.put_object(Bucket="bucket", Key="data/a.txt", Body=b"b")
        assert trigger(server, what).kind == "started"
        names = [item["Key"] for item in client.list_objects_v2(Bucket="bucket")["Contents"]]
        assert "triggers/bot/last.json" in names


def test_unwatchable_or_unwritable_addresses_are_rejected(kfp, what, tmp_path):
    with pytest.raises(BadInput, match="cannot be watched"):
        made("hub:some/data", tmp_path)
    (tmp_path / "file").write_text("")
    beside = made(what.config.data.source[0], tmp_path, state=str(tmp_path / "file" / "state"))
    with pytest.raises(StorageError, match="cannot use"):
        trigger(connect(kfp.address), beside)
    (tmp_path / "triggers" / "bot").mkdir(parents=True)
    (tmp_path / "triggers" / "bot" / "last.json").write_text("{}")
    with pytest.raises(StorageError, match="was not written by a trigger"):
        trigger(connect(kfp.address), what)


class Clock:
    """Time that passes only while the watcher waits. Each wait runs the next action of a plan."""

    def __init__(self, monkeypatch, *plan):
        self.now, self.plan, self.told = 1000.0, list(plan), []
        monkeypatch.setattr(triggers.time, "monotonic", lambda: self.now)

    def wait(self, seconds):
        self.now += seconds
        if not self.plan:
            return True
        self.plan.pop(0)()
        return False

    def watch(self, server, what):
        return watch(
            server,
            what,
            every_seconds=10,
            quiet_seconds=30,
            notify=self.told.append,
            wait=self.wait,
        )


def nothing():
    pass


def test_watcher_waits_for_an_upload_to_finish(kfp, what, monkeypatch):
    server, counts = connect(kfp.address), []
    uploads = [lambda number=number: add(what, f"{number}.txt") for number in range(5)]
    quiet = [lambda: counts.append(len(kfp.all("runs")))] * 5
    Clock(monkeypatch, *uploads, *quiet).watch(server, what)
    assert counts == [0, 0, 0, 1, 1]


def test_watcher_starts_a_failed_run_again(kfp, what, monkeypatch):
    monkeypatch.setattr(triggers, "_RETRY_SECONDS", (0.0, 0.0))
    failures = [lambda: end_runs(kfp, "FAILED"), nothing] * 3
    clock = Clock(monkeypatch, *[nothing] * 4, *failures, *[nothing] * 3)
    answers = clock.watch(connect(kfp.address), what)
    assert len(kfp.all("runs")) == len(answers) == 3
    first, second, third, given_up = clock.told
    assert first.startswith("started bot-")
    assert "try 2 of 3" in second
    assert "try 3 of 3" in third
    assert "is not started again" in given_up


def test_watcher_starts_the_next_run_after_the_previous_one(kfp, what, monkeypatch):
    server = connect(kfp.address)
    plan = [nothing] * 4 + [lambda: add(what)] + [nothing] * 6 + [lambda: end_runs(kfp), nothing]
    clock = Clock(monkeypatch, *plan)
    answers = clock.watch(server, what)
    started, busy, again = clock.told
    assert started.startswith("started bot-")
    assert "is running" in busy
    assert again.startswith("started bot-")
    assert len(kfp.all("runs")) == 2
    assert [str(answer) for answer in answers] == [started, again]


def test_for_programs_a_watcher_ends_with_the_runs_that_it_started(
    kfp, what, tmp_path, monkeypatch, capsys
):
    answer = triggers.Answer("started", "bot-1", "id-1", "")
    monkeypatch.setattr(triggers, "watch", lambda *_, notify, **__: notify("text") or [answer])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    watched = [
        "watch",
        "causal-lm",
        "--set",
        "name=bot",
        "--set",
        f"data.source={what.config.data.source}",
    ]
    cli.app(
        [*watched, "--output", str(tmp_path), "--host", kfp.address, "--json"],
        standalone_mode=False,
    )
    out, err = capsys.readouterr()
    assert json.loads(out) == {"started": [{"run": "bot-1", "run_id": "id-1", "link": None}]}
    assert "watching" in err
    assert "text" in err


def test_watcher_survives_temporary_failures(kfp, what, monkeypatch):
    server, first = connect(kfp.address), Path(what.config.data.source[0], "a.txt")
    first.unlink()

    def broken():
        first.write_text("a")
        kfp.fail_next = [("GET /apis/v2beta1/runs", 503)] * 30

    def fixed():
        kfp.fail_next.clear()

    monkeypatch.setattr(triggers.time, "sleep", lambda _: None)
    (Path(what.state) / "bot").mkdir(parents=True)
    (Path(what.state) / "bot" / "last.json").write_text('{"digest": "d", "run": "r"}')
    clock = Clock(monkeypatch, nothing, broken, *[nothing] * 4, fixed, nothing)
    clock.watch(server, what)
    assert "no file found there" in clock.told[0]
    assert any("503" in text for text in clock.told)
    assert clock.told[-1].startswith("started bot-")


def test_watcher_without_access_reports_it_and_exits(kfp, what, monkeypatch):
    server = connect(kfp.address)
    kfp.token = "another"
    clock = Clock(monkeypatch, *[nothing] * 30)
    with pytest.raises(ServerError, match="401"):
        clock.watch(server, what)
    assert "401" in clock.told[0]
    assert len(clock.plan) > 5, "after three minutes"


@pytest.mark.parametrize("status", [401, 403])
def test_watcher_survives_a_temporary_denial(kfp, what, monkeypatch, status):
    server = connect(kfp.address)
    kfp.fail_next = [("GET /apis/v2beta1", status)] * 3
    clock = Clock(monkeypatch, *[nothing] * 12)
    clock.watch(server, what)
    assert clock.told[-1].startswith("started bot-")
    assert kfp.fail_next == []


def test_command_triggers_a_run(kfp, what, tmp_path):
    path = tmp_path / "bot.yaml"
    path.write_text(what.config.to_yaml())
    line = ["trigger", str(path), "--host", kfp.address, "--experiment", "data"]
    done = CliRunner().invoke(cli.app, line)
    assert done.exit_code == 0
    assert done.stdout.startswith("started bot-")
    assert "nothing to start" in CliRunner().invoke(cli.app, line).stdout
    told = json.loads(CliRunner().invoke(cli.app, [*line, "--json"]).stdout)
    assert told["outcome"] == "known"
    assert done.stdout.split()[1] == told["run"]
    assert kfp.all("experiments")[0]["display_name"] == "data"


@pytest.mark.slow
def test_watching_command_starts_a_run_and_ends_on_sigterm(kfp, what, tmp_path):
    path = tmp_path / "bot.yaml"
    path.write_text(what.config.to_yaml())
    line = [sys.executable, "-m", "steadytrain.pipelines.cli", "watch", path, "--every", "1"]
    watcher = subprocess.Popen(
        [*line, "--quiet", "0", "--host", kfp.address, "--pipeline", "finetune"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        wait_for(lambda: kfp.all("runs"))
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(watcher.stdout))
        reader.start()
        wait_for(lambda: any("started bot-" in line for line in lines))
        watcher.send_signal(signal.SIGTERM)
        assert watcher.wait(300) == 0
        reader.join()
    finally:
        watcher.kill()
    assert lines[0].startswith("watching ")
