"""Schedules in a file are created, kept, replaced, or deleted, even after a killed apply."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
import yaml
from typer.testing import CliRunner

from steadytrain.components.shared.config import from_parameters
from steadytrain.components.shared.errors import BadInput, ConfigError, ServerError
from steadytrain.components.shared.kubeflow.connection import connect
from steadytrain.pipelines import cli
from steadytrain.pipelines.server import schedule_file, schedules

FILE = {
    "name": "nightly",
    "experiment": "retraining",
    "schedules": [
        {
            "name": "bot",
            "config": "chat",
            "overrides": {"output": "/mnt/shared", "data.source": ["hub:chats"]},
            "cron": "30 3 * * MON-FRI",
            "time_zone": "Asia/Kolkata",
        },
        {
            "name": "classes",
            "config": "sequence-classification",
            "overrides": {"output": "/mnt/shared"},
            "interval": "6h",
            "max_concurrency": 2,
        },
    ],
}


@pytest.fixture(autouse=True)
def compiled():
    """Stub out compilation, which takes a second and has its own tests."""
    content = {
        "root": {
            "inputDefinitions": {
                "parameters": {
                    "config": {"parameterType": "STRING"},
                    "output": {"parameterType": "STRING"},
                    "run": {"parameterType": "STRING"},
                }
            }
        },
    }

    def compile_pipeline(path, notify, pipeline, shape):
        named = {"pipelineInfo": {"name": f"steadytrain-{pipeline}"}}
        path.write_text(yaml.safe_dump(content | named))
        return path

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedules, "compile_pipeline", compile_pipeline)
        yield content


@pytest.fixture
def write(tmp_path):
    """Write a file of schedules, with changes to the first one."""

    def written(first=None, keep=2, **changes):
        content = {**FILE, **changes}
        content["schedules"] = [{**FILE["schedules"][0], **(first or {})}, FILE["schedules"][1]]
        content["schedules"] = content["schedules"][:keep]
        path = tmp_path / "schedules.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    return written


@pytest.fixture
def apply(kfp, write):
    """Apply a file and return the action for each schedule by name."""

    def applied(**options):
        changes = schedules.apply(
            connect(kfp.address), schedules.Declaration.read(write(**options))
        )
        return {change.name: change.action for change in changes}

    return applied


def on_server(kfp, name):
    found = [item for item in kfp.all("recurringruns") if item["display_name"] == name]
    assert len(found) == 1
    return found[0]


def command(kfp, *arguments):
    return CliRunner().invoke(
        cli.app, ["schedule", *map(str, arguments), "--host", kfp.address], terminal_width=200
    )


def test_schedules_are_created_as_declared(kfp, apply):
    assert apply() == {"bot": "create", "classes": "create"}
    bot, classes = on_server(kfp, "bot"), on_server(kfp, "classes")
    assert bot["trigger"] == {"cron_schedule": {"cron": "0 0 22 * * 0,1,2,3,4"}}
    assert bot["no_catchup"]
    assert bot["status"] == "ENABLED"
    assert classes["trigger"] == {"periodic_schedule": {"interval_second": "21600"}}
    assert (bot["max_concurrency"], classes["max_concurrency"]) == ("1", "2")
    assert kfp.all("experiments")[0]["display_name"] == "retraining"
    assert [item["display_name"] for item in kfp.all("pipelines")] == ["steadytrain-retrain"]


def test_each_occurrence_is_its_own_run(kfp, apply):
    apply()
    given = on_server(kfp, "bot")["runtime_config"]["parameters"]
    first = from_parameters(**given, overrides={}, job="1234abcd-0000")
    second = from_parameters(**given, overrides={}, job="5678abcd-0000")
    assert (first.run_id, second.run_id) == ("bot-1234abcd", "bot-5678abcd")
    assert first.digest() == second.digest()
    assert first.output == "/mnt/shared"


def test_second_apply_writes_nothing(kfp, apply):
    apply()
    kfp.requests.clear()
    assert apply() == {"bot": "keep", "classes": "keep"}
    assert kfp.writes() == []


@pytest.mark.parametrize(
    "change",
    [
        {"cron": "45 3 * * *"},
        {"time_zone": "UTC"},
        {"overrides": {"output": "/mnt/other", "data.source": ["hub:chats"]}},
        {"catch_up": True},
        {"max_concurrency": 3},
        {"end": datetime(2040, 1, 1, tzinfo=UTC)},
        {"description": "another one"},
        {"service_account": "trainer"},
        {"pipeline": "finetune"},
    ],
)
def test_only_changed_schedules_are_replaced(kfp, apply, change):
    apply()
    old, other = on_server(kfp, "bot"), on_server(kfp, "classes")
    kfp.requests.clear()
    assert apply(first=change) == {"bot": "replace", "classes": "keep"}
    assert on_server(kfp, "bot")["recurring_run_id"] != old["recurring_run_id"]
    assert on_server(kfp, "classes") == other
    gone = f"DELETE /apis/v2beta1/recurringruns/{old['recurring_run_id']}"
    assert kfp.writes()[-2:] == ["POST /apis/v2beta1/recurringruns", gone]


def test_schedule_of_a_study_needs_a_space(kfp, apply):
    with pytest.raises(BadInput, match=r"tune\.space"):
        apply(first={"pipeline": "tune"})
    place = {"output": "/mnt/shared", "data.source": ["hub:chats"]}
    place |= {"training.max_steps": 100, "training.eval_steps": 10}
    rates = {"tune.space": {"training.learning_rate": {"low": 1e-5, "high": 1e-3}}}
    assert apply(first={"pipeline": "tune", "overrides": place | rates})["bot"] == "create"


def test_search_is_scheduled(kfp, apply):
    first = {"pipeline": "automl", "config": "vote", "overrides": {"output": "/mnt/shared"}}
    assert apply(first=first)["bot"] == "create"
    names = {item["display_name"] for item in kfp.all("pipelines")}
    assert names == {"steadytrain-automl", "steadytrain-retrain"}


def test_changed_pipeline_replaces_all_schedules(kfp, apply, compiled):
    apply()
    compiled["schemaVersion"] = "2.1.0"
    assert set(apply().values()) == {"replace"}
    versions = {version["pipeline_version_id"] for version in kfp.all("versions")}
    bot = on_server(kfp, "bot")["pipeline_version_reference"]["pipeline_version_id"]
    assert {bot} < versions


def test_schedule_removed_from_the_file_is_deleted(kfp, apply):
    apply()
    assert apply(keep=1) == {"bot": "keep", "classes": "delete"}
    assert [item["display_name"] for item in kfp.all("recurringruns")] == ["bot"]


def test_foreign_schedules_are_never_changed(kfp, apply):
    apply()
    bot = on_server(kfp, "bot")
    theirs = {**bot, "recurring_run_id": "1", "display_name": "hand", "description": "by hand"}
    marked = bot["description"].replace("nightly/", "weekly/")
    others = {**bot, "recurring_run_id": "2", "display_name": "w", "description": marked}
    kfp.things["recurringruns"] |= {"1": dict(theirs), "2": dict(others)}
    apply(name="nightly", first={"name": "renamed"})
    assert kfp.things["recurringruns"]["1"] == theirs
    assert kfp.things["recurringruns"]["2"] == others
    assert isinstance(command(kfp, "delete", "hand").exception, BadInput)


def test_kill_after_creation_is_repaired_by_applying_again(kfp, apply, monkeypatch):
    apply()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(schedules, "delete", killed)
    with pytest.raises(KeyboardInterrupt):
        apply(first={"cron": "0 5 * * *"})
    monkeypatch.undo()
    enabled = [item for item in kfp.all("recurringruns") if item["status"] == "ENABLED"]
    assert len(enabled) == 3, "the old one runs on until the new one is known to be there"
    assert apply(first={"cron": "0 5 * * *"})["bot"] == "replace"
    assert on_server(kfp, "bot")["trigger"]["cron_schedule"]["cron"] == "0 30 23 * * *"
    assert apply(first={"cron": "0 5 * * *"})["bot"] == "keep"


def test_rejected_replacement_keeps_the_old_schedule(kfp, apply):
    apply()
    old = on_server(kfp, "bot")
    kfp.fail_next = [("POST /apis/v2beta1/recurringruns", 400)]
    with pytest.raises(ServerError, match="told to fail"):
        apply(first={"cron": "0 5 * * *"})
    assert on_server(kfp, "bot") == old


def test_replaced_schedule_stays_paused(kfp, apply):
    apply()
    assert command(kfp, "pause", "bot").exit_code == 0
    assert apply()["bot"] == "keep"
    apply(first={"cron": "0 5 * * *"})
    assert on_server(kfp, "bot")["status"] == "DISABLED"
    assert command(kfp, "resume", "nightly/bot").exit_code == 0
    assert on_server(kfp, "bot")["status"] == "ENABLED"


PAST, FUTURE = datetime(2020, 1, 1, tzinfo=UTC), datetime(2040, 1, 1, tzinfo=UTC)


def test_future_start_is_sent_and_past_start_is_left_to_catch_up(kfp, apply):
    apply(first={"start": FUTURE, "end": FUTURE + timedelta(days=1)})
    cron = on_server(kfp, "bot")["trigger"]["cron_schedule"]
    assert cron["start_time"].startswith("2040-01-01T00:00:00")
    assert cron["end_time"].startswith("2040-01-02T00:00:00")
    apply(first={"start": PAST})
    assert "start_time" not in on_server(kfp, "bot")["trigger"]["cron_schedule"]
    # If it were replaced with its start, it would run everything since then again.
    apply(first={"start": PAST, "catch_up": True})
    assert "start_time" not in on_server(kfp, "bot")["trigger"]["cron_schedule"]
    command(kfp, "delete", "bot")
    apply(first={"start": PAST, "catch_up": True})
    assert on_server(kfp, "bot")["trigger"]["cron_schedule"]["start_time"].startswith("2020-01-01")


def test_replaced_interval_keeps_its_phase(kfp, apply):
    every = {"cron": None, "time_zone": None, "interval": "1h", "start": PAST}
    apply(first=every)
    apply(first={**every, "max_concurrency": 2})
    begun = datetime.fromisoformat(
        on_server(kfp, "bot")["trigger"]["periodic_schedule"]["start_time"]
    )
    assert (begun - PAST) % timedelta(hours=1) == timedelta()
    assert timedelta() <= datetime.now(UTC) - begun < timedelta(hours=1)


def test_diff_shows_what_apply_would_change_and_changes_nothing(kfp, apply, write):
    path = write()
    fresh = command(kfp, "diff", path)
    assert fresh.exit_code == 1
    lines = fresh.stdout.splitlines()
    assert "+ bot: create" in lines
    assert "      +output: /mnt/shared" in lines
    # Defaults are not shown: the full configuration has two hundred lines.
    assert not any("max_grad_norm" in line for line in lines)
    assert len(lines) < 60
    assert kfp.writes() == []
    apply()
    same = command(kfp, "diff", write())
    assert (same.exit_code, same.stdout) == (0, "  bot: keep\n  classes: keep\n")
    path = write(
        first={
            "cron": "0 5 * * *",
            "overrides": {"output": "/mnt/other", "data.source": ["hub:chats"]},
        },
        keep=1,
    )
    changed = command(kfp, "diff", path)
    assert changed.exit_code == 1
    for line in (
        "~ bot: replace",
        "    when: 0 0 22 * * 0,1,2,3,4 -> 0 30 23 * * *",
        "      -output: /mnt/shared",
        "      +output: /mnt/other",
        "- classes: delete",
    ):
        assert line in changed.stdout.splitlines()
    assert command(kfp, "apply", path, "--dry-run").stdout == changed.stdout
    assert len(kfp.all("recurringruns")) == 2


def test_diff_with_another_versions_configuration_shows_only_differences(kfp, apply, write):
    apply()
    for run in kfp.all("recurringruns"):
        given = run["runtime_config"]["parameters"]
        given["config"] = given["config"].replace("seed: ", "forgotten_field: 3\n  seed: ", 1)
        assert "forgotten_field" in given["config"]
    changed = command(kfp, "diff", write(first={"cron": "0 5 * * *"}))
    lines = [line.strip() for line in changed.stdout.splitlines()]
    assert any("forgotten_field: 3" in line for line in lines)
    assert not any(line.startswith(("-", "+")) and "forgotten" not in line for line in lines), lines


def test_commands_apply_list_and_delete(kfp, write):
    assert "no steadytrain schedules" in command(kfp, "list").stdout
    done = command(kfp, "apply", write())
    assert done.stdout == "created nightly/bot\ncreated nightly/classes\n"
    command(kfp, "pause", "classes")
    shown = command(kfp, "list").stdout
    assert "nightly/bot" in shown
    assert "every 21600 s" in shown
    assert "paused" in shown
    listed = json.loads(command(kfp, "list", "--json").stdout)["schedules"]
    assert {item["schedule"]: item["enabled"] for item in listed} == {
        "nightly/bot": True,
        "nightly/classes": False,
    }
    kept = json.loads(command(kfp, "apply", write(), "--json").stdout)["changes"]
    assert [item["action"] for item in kept] == ["keep", "keep"]
    assert command(kfp, "delete", "bot").exit_code == 0
    changed = command(kfp, "diff", write(), "--json")
    actions = {item["schedule"]: item["action"] for item in json.loads(changed.stdout)["changes"]}
    assert (changed.exit_code, actions) == (1, {"bot": "create", "classes": "keep"})
    assert [item["display_name"] for item in kfp.all("recurringruns")] == ["classes"]
    missing = command(kfp, "pause", "bot")
    assert isinstance(missing.exception, BadInput)
    assert "nightly/classes" in missing.exception.remedy


def test_name_in_two_sets_must_be_qualified(kfp, apply):
    apply()
    apply(name="weekly")
    shared = command(kfp, "pause", "bot")
    assert isinstance(shared.exception, BadInput)
    assert command(kfp, "pause", "weekly/bot").exit_code == 0


def test_users_have_separate_schedules(kfp, write):
    kfp.multi_user = True
    server = connect(kfp.address, "team-a")
    schedules.apply(server, schedules.Declaration.read(write()))
    assert on_server(kfp, "bot")["namespace"] == "team-a"
    assert len(schedules.present(server)) == 2


@pytest.mark.parametrize(
    ("first", "words"),
    [
        ({"time_zone": "Europe/Berlin"}, ["schedules.0.time_zone", "daylight saving", "standard"]),
        ({"time_zone": None}, ["time_zone", "cron needs one", "such as UTC"]),
        ({"time_zone": "Mars/Base"}, ["schedules.0.time_zone = 'Mars/Base'", "not a time zone"]),
        (
            {"cron": "61 * * * *"},
            ["schedules.0.cron = '61 * * * *'", "not a valid minute (0 to 59)"],
        ),
        ({"cron": "30 0 1 * *"}, ["schedules.0.cron", "falls on other days", "in the server's"]),
        ({"interval": "6h"}, ["exactly one of cron and interval"]),
        ({"cron": None, "time_zone": None, "interval": "6"}, ["such as 6h"]),
        ({"cron": None, "time_zone": None, "interval": "30s"}, ["shorter than 60 s"]),
        ({"max_concurrency": 11}, ["schedules.0.max_concurrency = 11", "less than or equal to 10"]),
        ({"start": "tomorrow"}, ["schedules.0.start = 'tomorrow'"]),
        ({"start": datetime(2027, 1, 1)}, ["schedules.0.start", "timezone"]),
        ({"start": FUTURE, "end": PAST}, ["schedules.0.end", "not after start"]),
        ({"name": "classes"}, ["schedules.1.name", "taken in this file"]),
        ({"crom": "x"}, ["schedules.0.crom", "no such field", "cron"]),
        ({"overrides": {"x": "hf_" + "a" * 34}}, ["contains a secret"]),
    ],
)
def test_invalid_file_is_rejected_with_field_value_and_remedy(write, first, words):
    with pytest.raises(ConfigError) as raised:
        schedules.Declaration.read(write(first=first))
    for word in words:
        assert word in str(raised.value)


def test_every_problem_is_reported_at_once(write):
    with pytest.raises(ConfigError) as raised:
        schedule_file.read_schedules(
            write(first={"cron": "x", "max_concurrency": 0}, name="No Name")
        )
    assert len(raised.value.problems) == 3


def test_invalid_configuration_is_rejected(write):
    with pytest.raises(ConfigError, match="trainin"):
        schedules.Declaration.read(write(first={"overrides": {"trainin.x": 1, "output": "/x"}}))
    with pytest.raises(BadInput, match="pods do not share"):
        schedules.Declaration.read(write(first={"overrides": {}}))
    with pytest.raises(BadInput, match="not the name of a preset: no such file"):
        schedules.Declaration.read(write(first={"config": "none.yaml"}))


def test_configuration_may_be_inline_or_in_another_file(write, tmp_path):
    content = {"name": "x", "output": "/mnt/x", "model": {"base": "hub:m"}}
    content["data"] = {"source": ["s3://bucket/a"]}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(content))
    for config in ("x.yaml", content):
        read = schedules.Declaration.read(write(first={"config": config, "overrides": {}}))
        assert "base: hub:m" in read.parameters["bot"]["config"]


@pytest.mark.parametrize("text", ["- a", "a: [", "\0"])
def test_file_that_is_not_a_mapping_is_rejected(tmp_path, text):
    path = tmp_path / "file.yaml"
    path.write_text(text)
    with pytest.raises(BadInput, match=r"file\.yaml"):
        schedule_file.read_schedules(path)
    with pytest.raises(BadInput, match="no such file"):
        schedule_file.read_schedules(tmp_path / "none.yaml")
