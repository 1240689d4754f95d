"""gc removes only the prepared data that no resumable run needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from steadytrain.components.preprocess.prepared import scratch
from steadytrain.pipelines.cli import app
from steadytrain.pipelines.gc import garbage
from steadytrain.pipelines.runs import run_lock

HOUR = 3600.0


def gc(output, *options):
    done = CliRunner().invoke(app, ["gc", "--output", str(output), *options])
    assert done.exit_code == 0, done.output
    return done.output


def finish(run):
    run.workspace.model.mkdir()
    run.trained(steps=30)
    run.decided(False, "no better", metric="loss", greater_is_better=False, candidate=1.0)
    run.start_step("register")
    run.finish("register", 1.0)


def make_old(*folders):
    then = time.time() - 48 * HOUR
    for folder in folders:
        os.utime(folder, (then, then))


@pytest.fixture
def using(make_run, age):
    """Write a run that used data prepared long ago."""

    def make(name="tiny", *, done=False, **options):
        run = make_run(name, **options)
        run.preprocess()
        if done:
            finish(run)
        age(run)
        make_old(data(run))
        return run

    return make


def data(run):
    (folder,) = run.workspace.prepared.glob("[!.]*")
    return folder


def test_data_of_finished_runs_are_removed(using, tmp_path):
    run = using(done=True)
    assert "would remove prepared data 5f3a9c1be2d44a70" in gc(tmp_path / "output", "--dry-run")
    assert data(run).is_dir()
    assert "removed prepared data 5f3a9c1be2d44a70" in gc(tmp_path / "output")
    assert not list(run.workspace.prepared.iterdir())


def test_a_teachers_answers_go_with_their_data(using, age, tmp_path):
    run = using("broken")
    answers = run.workspace.prepared / f"{data(run).name}.teacher-0123"
    answers.mkdir()
    make_old(answers)
    assert "prepared data" not in gc(tmp_path / "output")
    assert answers.is_dir()
    finish(run)
    age(run)
    assert f"removed prepared data {answers.name}" in gc(tmp_path / "output")
    assert not answers.exists()


def test_unreferenced_data_are_removed(tmp_path):
    left = tmp_path / "output" / "data" / "unnamed"
    left.mkdir(parents=True)
    make_old(left)
    assert "removed prepared data unnamed" in gc(tmp_path / "output")


def test_data_of_a_resumable_run_stay(using, tmp_path):
    using("done", done=True)
    run = using("broken")
    assert "prepared data" not in gc(tmp_path / "output", "--idle-hours", "0")
    assert data(run).is_dir()


def test_data_of_a_finished_run_whose_model_is_gone_stay(using, tmp_path):
    run = using(done=True)
    run.workspace.model.rmdir()
    assert "prepared data" not in gc(tmp_path / "output", "--idle-hours", "0")


def test_data_of_a_finished_run_in_use_stay(using, tmp_path):
    run = using(done=True)
    with run_lock(run.workspace):
        assert "prepared data" not in gc(tmp_path / "output", "--idle-hours", "0")


def test_recently_used_data_are_kept(using, tmp_path):
    run = using(done=True)
    os.utime(data(run))
    assert "prepared data" not in gc(tmp_path / "output")


def test_data_seen_at_another_path_by_a_pod_stay(using, tmp_path):
    using()
    shutil.move(tmp_path / "output", tmp_path / "mounted")
    assert "prepared data" not in gc(tmp_path / "mounted", "--idle-hours", "0")


@pytest.mark.parametrize("at_work", [True, False])
def test_damaged_record_of_a_running_run_keeps_all_data(using, tmp_path, at_work):
    using("done", done=True)
    run = using("damaged")
    run.workspace.record("preprocess").write_text("{")
    with run_lock(run.workspace) if at_work else run_lock(using("another", done=True).workspace):
        kept = "prepared data" not in gc(tmp_path / "output", "--dry-run", "--idle-hours", "0")
    assert kept


def test_data_claimed_during_removal_are_restored(using, tmp_path):
    using("done", done=True)
    (item,) = garbage(tmp_path / "output", idle_seconds=HOUR)
    late = using("late")
    assert not item.remove()
    assert (data(late) / "card.json").is_file()


def test_next_gc_decides_on_data_set_aside_by_a_killed_one(using, tmp_path):
    run = using()
    folder = data(run)
    folder.rename(folder.with_name(f".removed-{folder.name}"))
    aside = folder.with_name(".removed-other")
    aside.mkdir()
    assert "removed prepared data .removed-other" in gc(tmp_path / "output")
    assert [item.name for item in folder.parent.iterdir()] == [folder.name]


def test_scratch_data_of_killed_steps_are_removed_and_of_running_steps_kept(tmp_path):
    root = tmp_path / "output" / "data"
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from steadytrain.components.preprocess.prepared import scratch\n"
        "with scratch(Path(sys.argv[1]), 'killed'):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(root)], check=False)
    (left,) = root.iterdir()
    make_old(left, *left.iterdir())
    told = gc(root.parent, "--dry-run")
    assert f"would remove unfinished data {left.name}" in told
    with root.joinpath("file").open("w"):
        assert f"removed unfinished data {left.name}" in gc(root.parent)
    with scratch(root, "at-work") as folder:
        make_old(folder, *folder.iterdir())
        assert "unfinished" not in gc(root.parent, "--idle-hours", "0")
        assert Path(folder).is_dir()
