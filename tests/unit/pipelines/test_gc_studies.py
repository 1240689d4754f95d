"""What gc removes of studies, and what it never removes."""

from __future__ import annotations

import os
import shutil
import time
import zlib

import pytest

from steadytrain.components.shared.append_log import encode
from steadytrain.components.shared.config import load
from steadytrain.components.tune.driver import drive, driving, study_folder
from steadytrain.components.tune.study import Study
from steadytrain.components.tune.trials.folder import TrialFolder
from steadytrain.pipelines.gc import unneeded_by_studies

from support.synthetic_trials import SPACE, Quiet, SyntheticTrials, World

HOUR = 3600.0


@pytest.fixture
def make_study(tmp_path):
    """Drive a study, and leave files of its trials and its data as a killed driver would."""

    def make(pruner="none", idle=2 * HOUR, steps=360):
        config = load(
            "causal-lm",
            [
                ("output", str(tmp_path)),
                ("tune.space", SPACE),
                ("tune.pruner", pruner),
                "training.max_steps=90",
                "training.eval_steps=10",
                "tune.budget.trials=4",
                ("tune.budget.steps", steps),
            ],
        )
        folder = study_folder(config)
        with driving(config) as log:
            study = Study(config, log)
            drive(study, SyntheticTrials(World()), Quiet(), lambda: None, poll_seconds=0)
        for trial in study.history.trials:
            place = TrialFolder(folder, trial.number)
            place.configure(study.trial_config(trial.params), 1)
            (place.workspace.checkpoints / "step-00000010").mkdir(parents=True)
        (folder / "data" / "x").mkdir(parents=True)
        (folder / "data" / "x" / "rows").write_bytes(b"0" * 1000)
        then = time.time() - idle
        os.utime(folder / "log.jsonl", (then, then))
        return config, folder, study

    return make


def found(folder):
    return list(unneeded_by_studies(folder.parents[1], idle_seconds=HOUR))


def test_ended_trials_keep_their_record_and_the_study_its_log(make_study):
    _, folder, _ = make_study()
    garbage = found(folder)
    assert [item.what.split(" of ")[0] for item in garbage] == [
        *(f"trial {number}" for number in range(4)), "data",
    ]  # fmt: skip
    assert garbage[-1].bytes == 1000
    assert all(item.remove() for item in garbage)
    assert not found(folder)
    assert not (folder / "data").exists()
    assert (folder / "log.jsonl").exists()
    assert [path.name for path in TrialFolder(folder, 1).path.iterdir()] == ["record.json"]


def test_paused_trial_keeps_its_checkpoint_and_the_data(make_study):
    _, folder, study = make_study(pruner="hyperband", steps=150)
    paused = {trial.number for trial in study.history.trials if trial.status == "paused"}
    assert paused
    whats = " ".join(item.what for item in found(folder))
    assert "data of" not in whats
    assert not any(f"trial {number} of" in whats for number in paused)


def test_study_that_is_driven_or_was_recently_is_left_alone(make_study):
    config, folder, _ = make_study(idle=0)
    assert not found(folder)
    then = time.time() - 2 * HOUR
    os.utime(folder / "log.jsonl", (then, then))
    garbage = found(folder)
    with driving(config):
        assert not found(folder)
        assert not any(item.remove() for item in garbage)


FORGERIES = {
    "no checksum": lambda lines: [lines[0].replace(b"causal", b"casual"), *lines[1:]],
    "not JSON": lambda lines: [lines[0], signed(b'{"n":1,"kind":')],
    "no number": lambda lines: [lines[0], signed(b'{"kind":"discarded"')],
    "no configuration": lambda lines: [encode({"kind": "opened"}, 0)],
    "no study": lambda lines: [encode({"kind": "opened", "config": "causal-lm"}, 0)],
    "no kind": lambda lines: [lines[0], encode({"number": 0}, 1)],
    "another number": lambda lines: [lines[0], encode({"kind": "started", "number": 3}, 1)],
    "unknown trial": lambda lines: [lines[0], encode({"kind": "discarded", "number": 0}, 1)],
    "text as number": lambda lines: [lines[0], encode({"kind": "failed", "number": "0"}, 1)],
}


def signed(body):
    return body + b',"sum":"%08x"}\n' % zlib.crc32(body)


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)
def test_damaged_study_is_left_alone_and_the_next_one_is_cleaned(make_study, forge, caplog):
    _, folder, _ = make_study()
    damaged = folder.with_name("aaa")
    shutil.copytree(folder, damaged)
    log = damaged / "log.jsonl"
    # A last line that is damaged would only cost that line.
    lines = [*forge(log.read_bytes().splitlines(keepends=True)), b"end\n"]
    log.write_bytes(b"".join(lines))
    then = time.time() - 2 * HOUR
    os.utime(log, (then, then))
    garbage = found(folder)
    assert len(garbage) == 5
    assert all(str(folder.name) in item.what for item in garbage)
    assert "study aaa is damaged and was not changed" in caplog.text


def test_what_links_lead_to_is_kept(make_study, tmp_path):
    _, folder, _ = make_study()
    for number, path in enumerate((TrialFolder(folder, 0).path, folder / "data")):
        path.rename(tmp_path / f"elsewhere-{number}")
        path.symlink_to(tmp_path / f"elsewhere-{number}")
    garbage = found(folder)
    assert [item.what.split(" of ")[0] for item in garbage] == ["trial 1", "trial 2", "trial 3"]
    assert all(item.remove() for item in garbage)
    assert (tmp_path / "elsewhere-0" / "config.yaml").exists()
    assert (tmp_path / "elsewhere-1" / "x" / "rows").exists()
