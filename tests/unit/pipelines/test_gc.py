"""What gc removes, and what it never does."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from steadytrain.components.report.words import size
from steadytrain.components.shared.lock import run_lock
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.train.checkpoint import newest
from steadytrain.components.train.lease import hold
from steadytrain.pipelines.cli import app
from steadytrain.pipelines.gc import litter

HOUR = 3600.0


def gc(run, *options):
    done = CliRunner().invoke(app, ["gc", "--output", str(run.workspace.output), *options])
    assert done.exit_code == 0, done.output
    return done.output


def steps(run):
    return sorted(path.name for path in run.workspace.checkpoints.iterdir())


def finish(run):
    """Trained and registered; the gate said no."""
    run.workspace.model.mkdir()
    run.trained(steps=30)
    run.decided(False, "no better", metric="loss", greater_is_better=False, candidate=1.0)
    run.begin("register")
    run.finish("register", 1.0)


def test_of_a_run_that_can_be_resumed_the_newest_and_the_best_stay(make_run, age):
    run = make_run(saved=(10, 20, 30, 40), best=20)
    run.fail("train", "TrainingFailed", "broken")
    age(run)
    assert gc(run).count("removed checkpoint") == 2
    assert steps(run) == ["step-00000020", "step-00000040"]
    assert "nothing to remove" in gc(run)


def test_newer_ones_than_the_newest_whole_one_stay_too(make_run, age):
    run = make_run(saved=(10, 20, 30))
    (damaged,) = run.workspace.checkpoints.glob("step-00000030/*.model.safetensors")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    age(run)
    gc(run)
    assert steps(run) == ["step-00000020", "step-00000030"]
    assert newest(run.workspace.checkpoints).name == "step-00000020"


def test_without_a_whole_one_nothing_goes(make_run, age):
    run = make_run(saved=(10,))
    (damaged,) = run.workspace.checkpoints.glob("step-00000010/*.model.safetensors")
    damaged.write_bytes(b"")
    (run.workspace.checkpoints / "step-00000020").mkdir()
    age(run)
    assert "nothing to remove" in gc(run)


def test_of_a_finished_run_all_go_and_the_model_stays(make_run, age):
    run = make_run(saved=(10, 20, 30))
    finish(run)
    (run.workspace.checkpoints / "step-00000020" / "COMMIT").rename(
        run.workspace.checkpoints / "step-00000020" / "DAMAGED"
    )
    age(run)
    gc(run)
    assert steps(run) == []
    assert run.workspace.model.is_dir()


def test_a_finished_run_whose_model_is_gone_can_be_resumed(make_run, age):
    run = make_run(saved=(10, 20))
    finish(run)
    run.workspace.model.rmdir()
    age(run)
    gc(run)
    assert steps(run) == ["step-00000020"]


def test_a_dry_run_lists_what_and_how_much_and_removes_nothing(make_run, age):
    run, other = make_run(saved=(10, 20, 30)), make_run("other", saved=(10, 20))
    age(run)
    age(other)
    folder = run.workspace.checkpoints / "step-00000010"
    held = sum(path.stat().st_size for path in folder.iterdir())
    out = gc(run, "--dry-run")
    for told in (
        f"would remove checkpoint step-00000010 of tiny, {size(held)}",
        "would remove checkpoint step-00000020 of tiny",
        "would remove checkpoint step-00000010 of other",
        "in all; without --dry-run they go",
    ):
        assert told in out
    assert len(steps(run)) == 3
    assert len(steps(other)) == 2


def trains(workspace):
    return hold(LocalStorage(workspace.lease), run_id=workspace.run_id, seconds=60)


@pytest.mark.parametrize("at_work", [run_lock, trains])
def test_a_run_at_work_is_left_alone(make_run, age, at_work):
    run = make_run(saved=(10, 20))
    age(run)
    with at_work(run.workspace):
        assert "nothing to remove" in gc(run)
    assert len(steps(run)) == 2


def test_a_run_that_is_taken_up_while_gc_looks_is_left_alone(make_run, age):
    run = make_run(saved=(10, 20))
    age(run)
    found = list(litter(run.workspace.output, idle_seconds=HOUR))
    with run_lock(run.workspace):
        assert [item.remove() for item in found] == [False]
    run.warn("still here")
    assert [item.remove() for item in found] == [False]
    assert len(steps(run)) == 2


def test_a_run_with_a_sign_of_life_of_late_is_left_alone_unless_asked(make_run):
    run = make_run(saved=(10, 20))
    assert "nothing to remove" in gc(run)
    assert "removed checkpoint step-00000010" in gc(run, "--idle-hours", "0")


def test_folders_that_are_no_runs_are_passed_over(make_run, tmp_path):
    run = make_run()
    (tmp_path / "output" / "runs" / "empty").mkdir()
    assert "nothing to remove" in gc(run, "--idle-hours", "0")
