"""The data, the champion, and the newest candidate decide whether there is anything new."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from steadytrain.components.detect_change.step import run
from steadytrain.components.shared.config import to_parameters
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import StepFailed
from steadytrain.pipelines.compile import compile_pipeline

from support import kfp_local


def add_data(config, text="another text\n"):
    Path(config.data.source[0], "b.txt").write_text(text)


def test_all_data_are_new_without_a_champion(config):
    news = run(config)
    assert news.found
    assert news.reason == "tiny has no champion yet"


def test_champion_training_data_are_not_new(config, learned):
    learned("champion")
    news = run(config)
    assert not news.found
    assert news.reason == ("nothing new: version 1 of tiny (champion) was trained on these data")


@pytest.mark.parametrize("change", ["added", "changed", "removed"])
def test_changed_data_are_new(config, learned, change):
    add_data(config)
    learned("champion")
    first = Path(config.data.source[0], "a.txt")
    if change == "added":
        Path(config.data.source[0], "c.txt").write_text("a third one")
    elif change == "changed":
        first.write_text("the first text, fixed\n")
    else:
        first.unlink()
    news = run(config)
    assert news.found
    assert "differ from those of the champion, version 1" in news.reason


def test_data_of_a_rejected_candidate_are_not_retried(config, learned):
    learned("champion")
    add_data(config)
    learned("candidate")
    assert run(config).reason.startswith("nothing new: version 2 of tiny (candidate)")
    add_data(config, "newer ones\n")
    assert run(config).found


def test_foreign_champion_cannot_be_compared(config, learned):
    learned("champion", tags={})
    news = run(config)
    assert news.found
    assert "cannot be compared" in news.reason


def test_missing_data_are_an_error(config):
    Path(config.data.source[0], "a.txt").unlink()
    with pytest.raises(BadInput, match="no file found there"):
        run(config)


def test_step_leaves_no_run_behind(config, learned):
    learned("champion")
    run(config)
    assert not Path(config.output, "runs").exists()


@pytest.fixture
def retrain(config, tmp_path):
    """Run the compiled retraining pipeline with kfp.local.

    Return its exit code, its output, and the folders of its runs.
    """
    path = compile_pipeline(tmp_path / "retrain.yaml", pipeline="retrain")
    parameters = tmp_path / "parameters.json"

    def run(name):
        parameters.write_text(json.dumps(to_parameters(config, run=name)))
        program = [sys.executable, kfp_local.__file__, path, parameters, tmp_path / "kfp"]
        done = subprocess.run(program, capture_output=True, text=True)
        runs = sorted(item.name for item in Path(config.output).glob("runs/*"))
        return done.returncode, done.stdout, runs

    return run


@pytest.mark.long
def test_pipeline_ends_early_and_succeeds_if_there_is_no_new_data(learned, retrain):
    learned("champion")
    code, told, runs = retrain("nightly-*")
    assert code == 0
    assert "nothing new: version 1 of tiny" in told
    assert runs == []


@pytest.mark.long
def test_pipeline_continues_if_there_is_new_data(config, learned, retrain):
    learned("champion")
    # The data are too small to be split: the next step starts and reports that.
    add_data(config)
    code, told, runs = retrain("nightly-*")
    assert code == 1
    assert "differ from those of the champion" in told
    assert len(runs) == 1
    assert runs[0].removeprefix("nightly-").isalnum()
    events = read_events(Path(config.output, "runs", runs[0], "events"))
    assert [event.stage for event in events if isinstance(event, StepFailed)] == ["preprocess"]
