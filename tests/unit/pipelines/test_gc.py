"""What gc removes, and what it never removes."""

from __future__ import annotations

import time

import pytest
from typer.testing import CliRunner

from steadytrain.components.shared.events.types import SupervisorStarted
from steadytrain.components.shared.lease import hold
from steadytrain.components.shared.quantities import size
from steadytrain.components.shared.storage import LocalStorage, open_storage
from steadytrain.components.train.checkpoint import (
    CheckpointStore,
    Lineage,
    checkpoints_of,
    newest,
    survey,
)
from steadytrain.pipelines.cli import app
from steadytrain.pipelines.gc import garbage
from steadytrain.pipelines.runs import run_lock

from support.checkpoints import save
from support.s3 import mocked_s3

HOUR = 3600.0


def gc(run, *options):
    done = CliRunner().invoke(app, ["gc", "--output", str(run.workspace.output), *options])
    assert done.exit_code == 0, done.output
    return done.output


def steps(run):
    return sorted(path.name for path in run.workspace.checkpoints.iterdir())


def finish(run):
    """Mark the run as trained and registered, but not promoted by the gate."""
    run.workspace.model.mkdir()
    run.trained(steps=30)
    run.decided(False, "no better", metric="loss", greater_is_better=False, candidate=1.0)
    run.start_step("register")
    run.finish("register", 1.0)


@pytest.fixture
def bucket(monkeypatch):
    with mocked_s3(monkeypatch) as client:
        yield client


ON_S3 = {"recovery": {"checkpoints": "s3://bucket/some"}}


def stored(run):
    return list(open_storage(checkpoints_of(run.config)).folders())


@pytest.fixture(params=["folder", "s3"])
def checkpoints(request):
    """Return the sections of a run that say where its checkpoints are."""
    if request.param == "s3":
        request.getfixturevalue("bucket")
    return ON_S3 if request.param == "s3" else {}


def test_resumable_run_keeps_its_newest_and_best_checkpoints(make_run, checkpoints):
    run = make_run(saved=(10, 20, 30, 40), best=20, **checkpoints)
    run.fail("train", "TrainingFailed", "broken")
    assert gc(run, "--idle-hours", "0").count("removed checkpoint") == 2
    assert stored(run) == ["step-00000020", "step-00000040"]
    assert "nothing to remove" in gc(run, "--idle-hours", "0")


def test_incomplete_checkpoints_after_the_newest_complete_one_stay(make_run, age):
    run = make_run(saved=(10, 20, 30))
    (damaged,) = run.workspace.checkpoints.glob("step-00000030/*.model.safetensors")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    age(run)
    gc(run)
    assert steps(run) == ["step-00000020", "step-00000030"]
    assert newest(run.workspace.checkpoints).name == "step-00000020"


def test_nothing_is_removed_without_a_complete_checkpoint(make_run, age):
    run = make_run(saved=(10,))
    (damaged,) = run.workspace.checkpoints.glob("step-00000010/*.model.safetensors")
    damaged.write_bytes(b"")
    (run.workspace.checkpoints / "step-00000020").mkdir()
    age(run)
    assert "nothing to remove" in gc(run)


def test_finished_run_keeps_only_its_model(make_run, checkpoints):
    run = make_run(saved=(10, 20, 30), **checkpoints)
    finish(run)
    open_storage(checkpoints_of(run.config)).delete("step-00000020/COMMIT")
    assert gc(run, "--idle-hours", "0").count("removed checkpoint") == 3
    assert stored(run) == []
    assert run.workspace.model.is_dir()


def test_finished_run_whose_model_is_gone_can_be_resumed(make_run, age):
    run = make_run(saved=(10, 20))
    finish(run)
    run.workspace.model.rmdir()
    age(run)
    gc(run)
    assert steps(run) == ["step-00000020"]


def test_dry_run_lists_what_and_how_much_and_removes_nothing(make_run, age):
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
        "in all; run it without --dry-run to remove them",
    ):
        assert told in out
    assert len(steps(run)) == 3
    assert len(steps(other)) == 2


def trains(workspace):
    return hold(LocalStorage(workspace.lease), run_id=workspace.run_id, seconds=60)


@pytest.mark.parametrize("at_work", [run_lock, trains])
def test_running_run_is_left_alone(make_run, age, at_work):
    run = make_run(saved=(10, 20))
    age(run)
    with at_work(run.workspace):
        assert "nothing to remove" in gc(run)
    assert len(steps(run)) == 2


def test_run_resumed_during_gc_is_left_alone(make_run, age):
    run = make_run(saved=(10, 20))
    age(run)
    found = list(garbage(run.workspace.output, idle_seconds=HOUR))
    with run_lock(run.workspace):
        assert [item.remove() for item in found] == [False]
    run.warn("still here")
    assert [item.remove() for item in found] == [False]
    assert len(steps(run)) == 2


def test_recently_active_run_is_kept_unless_requested(make_run):
    run = make_run(saved=(10, 20))
    assert "nothing to remove" in gc(run)
    assert "removed checkpoint step-00000010" in gc(run, "--idle-hours", "0")


def test_other_folders_are_skipped(make_run, tmp_path):
    run = make_run()
    (tmp_path / "output" / "runs" / "empty").mkdir()
    assert "nothing to remove" in gc(run, "--idle-hours", "0")


@pytest.mark.long
def test_remains_of_a_killed_upload_to_s3_are_removed(make_run, bucket):
    """So are torn checkpoints, and those of other runs stay."""
    run = make_run(saved=(10, 20, 30, 40), best=20, **ON_S3)
    place = "some/tiny/step-000000"
    bucket.delete_object(Bucket="bucket", Key=f"{place}30/COMMIT")
    bucket.create_multipart_upload(Bucket="bucket", Key=f"{place}35/x.safetensors")
    bucket.put_object(Bucket="bucket", Key="some/other/step-00000010/COMMIT", Body=b"")
    run.fail("train", "TrainingFailed", "broken")

    told = gc(run, "--dry-run", "--idle-hours", "0")
    held = sum(item["Size"] for item in _objects(bucket, f"{place}10/"))
    assert f"would remove checkpoint step-00000010 of tiny, {size(held)}" in told
    assert len(stored(run)) == 5

    assert gc(run, "--idle-hours", "0").count("removed checkpoint") == 3
    assert stored(run) == ["step-00000020", "step-00000040"]
    assert newest(checkpoints_of(run.config)).step == 40
    assert "Uploads" not in bucket.list_multipart_uploads(Bucket="bucket")
    assert _objects(bucket, "some/other/")
    assert "nothing to remove" in gc(run, "--idle-hours", "0")


def test_recent_writes_elsewhere_are_kept(make_run, age, bucket, monkeypatch):
    """A run with the same name, in another folder on another machine, saves to the same place."""
    run = make_run(saved=(10, 20), **ON_S3)
    age(run)
    assert "nothing to remove" in gc(run)
    later = time.time() + 25 * HOUR
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: later)
        (found,) = garbage(run.workspace.output, idle_seconds=24 * HOUR)
    assert not found.remove()
    assert len(stored(run)) == 2


@pytest.mark.slow
def test_unreachable_run_does_not_block_others(make_run, age, bucket, caplog):
    run = make_run("lost", saved=(10,), recovery={"checkpoints": "s3://bucket/some"})
    other = make_run("other", saved=(10, 20))
    for one in (run, other):
        age(one)
    for item in _objects(bucket, ""):
        bucket.delete_object(Bucket="bucket", Key=item["Key"])
    bucket.delete_bucket(Bucket="bucket")
    assert "removed checkpoint step-00000010 of other" in gc(other)
    assert "checkpoints of lost are kept" in caplog.text
    assert "NoSuchBucket" in caplog.text


def test_late_commit_does_not_evict_good_checkpoints(make_run, age):
    run = make_run(saved=(10, 20))
    found = survey(checkpoints_of(run.config), Lineage())
    run.ledger.record(SupervisorStarted(generation=2, pid=1, host="here", checkpoints=found))
    late = CheckpointStore(run.workspace.checkpoints, keep=9, lineage=Lineage(generation=1))
    save(late, 30)
    age(run)
    gc(run)
    assert steps(run) == ["step-00000020", "step-00000030"]


def _objects(client, prefix):
    return client.list_objects_v2(Bucket="bucket", Prefix=prefix).get("Contents", [])
