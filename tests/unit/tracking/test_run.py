from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import AttemptStarted, Warned
from steadytrain.components.shared.records import (
    DataRecord,
    EvaluationRecord,
    Interval,
    SideRecord,
)
from steadytrain.components.shared.tracking import (
    MlflowSink,
    check_tracking,
    finish_run,
    parent_run,
    use_tracking,
)
from steadytrain.components.shared.tracking.batches import MAX_VALUE, flatten, key
from steadytrain.components.shared.tracking.notes import RUN, remember
from steadytrain.components.shared.workspace import Workspace


def test_run_is_described_by_the_configuration(config: RunConfig, workspace: Workspace) -> None:
    run_id = parent_run(config, workspace)
    run = use_tracking(config, workspace).client.get_run(run_id)
    assert run.info.run_name == config.run_id
    assert run.info.status == "RUNNING"
    assert "training.learning_rate" not in run.data.params, "training tells which it takes"
    assert run.data.params["training.warmup_steps"] == str(config.training.warmup_steps)
    assert run.data.params["data.source"] == "['data.jsonl']"
    assert run.data.params["model.config.model_type"] == "gpt2"
    assert run.data.tags["steadytrain.config_digest"] == config.digest()


def test_run_is_created_once(config: RunConfig, workspace: Workspace) -> None:
    assert parent_run(config, workspace) == parent_run(config, workspace)


def test_changed_configuration_of_the_same_run_is_logged(
    make_config: Callable[..., RunConfig], workspace: Workspace
) -> None:
    """MLflow refuses to change a parameter. That must not stop a run that continues."""
    first = make_config(training={"learning_rate": 0.25})
    second = make_config(training={"learning_rate": 0.5})
    run_id = parent_run(first, workspace)
    assert parent_run(second, workspace) == run_id
    run = use_tracking(second, workspace).client.get_run(run_id)
    assert run.data.params["training.learning_rate"] == str(first.training.learning_rate)
    assert run.data.tags["steadytrain.config_digest"] == second.digest()


def test_given_run_is_continued(
    config: RunConfig, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = use_tracking(config, workspace).client
    given = client.create_run(client.create_experiment("elsewhere")).info.run_id
    client.log_param(given, "ticket", "17")
    monkeypatch.setenv("MLFLOW_RUN_ID", given)
    assert parent_run(config, workspace) == given
    assert client.get_run(given).data.params["name"] == "small"


def nested_in(client: Any, run_id: str) -> list[str]:
    run = client.get_run(run_id)
    found = client.search_runs([run.info.experiment_id], f"tags.mlflow.parentRunId = '{run_id}'")
    return [item.info.run_id for item in found]


def test_given_run_that_describes_another_is_kept(
    make_config: Callable[..., RunConfig], workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow would show the other run's parameters, and this run's results."""
    config = make_config(training={"learning_rate": 0.01})
    client = use_tracking(config, workspace).client
    given = client.create_run(client.create_experiment("elsewhere")).info.run_id
    client.log_param(given, "training.learning_rate", "0.5")
    before = client.get_run(given).to_dictionary()
    monkeypatch.setenv("MLFLOW_RUN_ID", given)
    own = parent_run(config, workspace)
    assert nested_in(client, given) == [own]
    assert client.get_run(own).data.params["training.learning_rate"] == "0.01"
    assert client.get_run(given).to_dictionary() == before
    assert parent_run(config, workspace) == own
    (warned,) = [event for event in read_events(workspace.events) if isinstance(event, Warned)]
    assert given in warned.message
    assert own in warned.message


def test_given_run_belongs_to_the_first_that_reports_into_it(
    make_config: Callable[..., RunConfig],
    config: RunConfig,
    workspace: Workspace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing differs but the name. The two would share a curve."""
    tracking = use_tracking(config, workspace)
    given = tracking.client.create_run(tracking.experiment_id).info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", given)
    assert parent_run(config, workspace) == given
    other = make_config(tracking={"uri": tracking.uri}, output=f"{workspace.output}-other")
    other_workspace = Workspace.of(other)
    other_workspace.create()
    own = parent_run(other, other_workspace)
    assert nested_in(tracking.client, given) == [own]
    assert parent_run(config, workspace) == given


def test_given_run_that_was_deleted_is_refused(
    config: RunConfig, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracking = use_tracking(config, workspace)
    given = tracking.client.create_run(tracking.experiment_id).info.run_id
    tracking.client.delete_run(given)
    monkeypatch.setenv("MLFLOW_RUN_ID", given)
    with pytest.raises(BadInput, match=f"MLFLOW_RUN_ID = '{given}'.*was deleted") as refused:
        check_tracking(config, workspace)
    assert refused.value.remedy == (
        f"restore it (mlflow runs restore --run-id {given}), or unset it"
    )
    tracking.client.restore_run(given)
    check_tracking(config, workspace)


@pytest.mark.slow
def test_steps_of_a_pipeline_share_the_run_of_the_pipeline(
    config: RunConfig, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plugin of Kubeflow Pipelines nests a run for each step, and gives the step its id."""
    tracking = use_tracking(config, workspace)
    client = tracking.client
    pipeline = client.create_run(tracking.experiment_id, run_name="pipeline").info.run_id
    monkeypatch.setenv("KFP_POD_NAME", "small-x7k2-system-container-impl-1")
    own = {}
    for name in ("preprocess", "train", "evaluate", "register", "report"):
        tags = {"mlflow.parentRunId": pipeline}
        own[name] = client.create_run(tracking.experiment_id, tags=tags, run_name=name).info.run_id
        monkeypatch.setenv("MLFLOW_RUN_ID", own[name])
        assert parent_run(config, workspace) == pipeline
        assert client.get_run(own[name]).data.tags["steadytrain.mlflow_run"] == pipeline
    assert sorted(nested_in(client, pipeline)) == sorted(own.values())
    run = client.get_run(pipeline)
    assert run.data.params["name"] == "small"
    links = {f"steadytrain.step_run.{name}": run_id for name, run_id in own.items()}
    assert links.items() <= run.data.tags.items()
    assert finish_run(config, workspace, ok=True)
    assert client.get_run(pipeline).info.status == "FINISHED"
    assert client.get_run(own["report"]).info.status == "RUNNING"


def test_nested_run_that_a_user_gives_is_used(
    config: RunConfig, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracking = use_tracking(config, workspace)
    outer = tracking.client.create_run(tracking.experiment_id).info.run_id
    tags = {"mlflow.parentRunId": outer}
    inner = tracking.client.create_run(tracking.experiment_id, tags=tags).info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", inner)
    assert parent_run(config, workspace) == inner


def test_remembered_run_that_is_gone_is_replaced(config: RunConfig, workspace: Workspace) -> None:
    first = parent_run(config, workspace)
    use_tracking(config, workspace).client.delete_run(first)
    second = parent_run(config, workspace)
    assert second != first
    assert parent_run(config, workspace) == second


@pytest.mark.parametrize("note", ["", "0" * 32])
def test_run_whose_note_was_lost_is_found_again(
    config: RunConfig, workspace: Workspace, note: str
) -> None:
    """For example, the process that created the run was killed before it wrote the note."""
    first = parent_run(config, workspace)
    remember(workspace, RUN, note)
    assert parent_run(config, workspace) == first


def test_run_of_the_same_name_in_another_folder_is_another_run(
    make_config: Callable[..., RunConfig], config: RunConfig, workspace: Workspace
) -> None:
    uri = f"sqlite:///{workspace.tracking_store}"
    other = make_config(output=str(workspace.output.parent / "other"), tracking={"uri": uri})
    other_workspace = Workspace.of(other)
    other_workspace.create()
    assert parent_run(other, other_workspace) != parent_run(config, workspace)


@pytest.mark.long
def test_processes_that_begin_at_once_create_one_run(
    config: RunConfig, workspace: Workspace
) -> None:
    use_tracking(config, workspace)
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from steadytrain.components.shared.config import load\n"
        "from steadytrain.components.shared.tracking import parent_run\n"
        "from steadytrain.components.shared.workspace import Workspace\n"
        "config = load(Path(sys.argv[1]))\n"
        "print(parent_run(config, Workspace.of(config)))\n"
    )
    workspace.config.write_text(config.to_yaml())
    command = [sys.executable, "-c", code, str(workspace.config)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    found = {process.communicate(timeout=600)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert found == {f"{parent_run(config, workspace)}\n"}
    tracking = use_tracking(config, workspace)
    assert len(tracking.client.search_runs([tracking.experiment_id])) == 1


def test_ended_run_is_opened_again(config: RunConfig, workspace: Workspace) -> None:
    client = use_tracking(config, workspace).client
    run_id = parent_run(config, workspace)
    assert finish_run(config, workspace, ok=False)
    assert client.get_run(run_id).info.status == "FAILED"
    parent_run(config, workspace)
    assert client.get_run(run_id).info.status == "RUNNING"
    assert finish_run(config, workspace, ok=False, stopped=True)
    assert client.get_run(run_id).info.status == "KILLED"
    assert finish_run(config, workspace, ok=True)
    assert client.get_run(run_id).info.status == "FINISHED"


def test_attempt_left_open_by_a_killed_supervisor_is_ended(
    config: RunConfig, workspace: Workspace
) -> None:
    stream = workspace.stream("supervisor")
    stream.emit(
        AttemptStarted(
            attempt=1, world_size=1, batch=BatchSettings(1), gradient_accumulation_steps=1
        )
    )
    stream.close()
    MlflowSink(config, workspace, batch_seconds=0.05, close_seconds=600).close()
    tracking = use_tracking(config, workspace)
    assert finish_run(config, workspace, ok=False)
    runs = tracking.client.search_runs([tracking.experiment_id])
    assert {run.info.run_name: run.info.status for run in runs} == {
        "attempt-1": "KILLED",
        config.run_id: "FAILED",
    }


def test_artifacts_and_results(config: RunConfig, workspace: Workspace, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "card.json").write_text("{}")
    workspace.config.write_text(config.to_yaml())
    workspace.transformers.mkdir()
    written = ("train_with_transformers.py", "training_args.json")
    for name in written:
        (workspace.transformers / name).write_text("{}")
    workspace.report.write_text("<html>")
    workspace.record("train").parent.mkdir()
    workspace.record("train").write_text("{}")
    side = SideRecord(shards=[], rows=1, documents=1)
    DataRecord(
        folder=str(data),
        fingerprint="f",
        task="causal_lm",
        sides={"train": side, "validation": side, "test": side},
        test_records="t",
        split_digest="s",
    ).save(workspace.record("preprocess"))
    EvaluationRecord(
        weights_digest="w",
        task="causal_lm",
        examples=3,
        metrics={"loss": Interval(value=2.5, low=2, high=3)},
        baselines={"unigram": 5.5},
        scores="s",
    ).save(workspace.record("evaluate"))

    assert finish_run(config, workspace, ok=True)
    run_id = parent_run(config, workspace)
    client = use_tracking(config, workspace).client
    folders = {item.path for item in client.list_artifacts(run_id)}
    assert folders == {"configuration", "data", "report", "training", "transformers"}
    scripts = {item.path for item in client.list_artifacts(run_id, "transformers")}
    assert scripts == {f"transformers/{name}" for name in written}
    assert [item.path for item in client.list_artifacts(run_id, "data")] == ["data/card.json"]
    assert client.get_run(run_id).data.metrics == {"test_loss": 2.5, "baseline_unigram": 5.5}


def test_store_that_is_down_at_the_end_is_a_warning(
    make_config: Callable[..., RunConfig], answer: Callable[[int, str], str]
) -> None:
    config = make_config(tracking={"uri": answer(404, "nothing here")})
    workspace = Workspace.of(config)
    workspace.create()
    assert not finish_run(config, workspace, ok=True)
    warnings = [event for event in read_events(workspace.events) if isinstance(event, Warned)]
    assert ["cannot be used" in event.message for event in warnings] == [True]


def test_values_are_cut_and_secrets_replaced() -> None:
    token = "hf_" + "a" * 34
    pairs = dict(flatten({"a": {"b": f"x {token}", "c": "y" * 9000, "d": {}}, "e": [1, None]}))
    assert pairs["a.b"] == "x [redacted]"
    assert len(pairs["a.c"]) == MAX_VALUE
    assert pairs["a.d"] == "{}"
    assert pairs["e"] == "[1, None]"


def test_keys_are_what_mlflow_takes(config: RunConfig, workspace: Workspace) -> None:
    tracking = use_tracking(config, workspace)
    run_id = tracking.client.create_run(tracking.experiment_id).info.run_id
    for name in ("f1(macro)", "recall@5", "größe", "k" * 900, "a/b:c d"):
        tracking.client.log_metric(run_id, key(name), 1.0)
    assert "f1_macro_" in tracking.client.get_run(run_id).data.metrics
