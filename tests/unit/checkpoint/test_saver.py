"""Saving during training: what all ranks learn about a save, and when."""

from __future__ import annotations

import json
import pickle
from types import SimpleNamespace

import boto3
import pytest
import torch
from botocore.exceptions import ClientError
from moto.core import set_initial_no_auth_action_count

from steadytrain.components.shared.errors import StorageError
from steadytrain.components.shared.events.types import CheckpointSaved, TrainingDiverged
from steadytrain.components.shared.storage import open_storage
from steadytrain.components.shared.storage.s3 import S3Storage
from steadytrain.components.train.attempt import AttemptFolder, RankError
from steadytrain.components.train.checkpoint import CheckpointStore, checkpoints_of, newest
from steadytrain.components.train.checkpoint.saver import Saver
from steadytrain.components.train.checkpoint.store import committed
from steadytrain.components.train.failures import FailureClass, NonFiniteState, classify
from steadytrain.components.train.loop.main import main

from support.checkpoints import same
from support.s3 import mocked_s3
from support.saving import World, saver, state, tensors
from support.training import events_of, losses_of


@pytest.mark.parametrize("snapshot", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_save_is_reported_only_after_all_ranks_saved(folder, size, snapshot):
    world, told = World(size), []

    def work(rank):
        store = CheckpointStore(folder, keep=2)
        own = Saver(
            store,
            rank=rank,
            world_size=size,
            gather=world.gather,
            on_saved=lambda saved: told.append((saved, saved.checkpoint.is_committed())),
            snapshot=snapshot,
        )
        for step in (1, 2, 3):
            own.save(step, 0, lambda step=step: state(float(step), rank, size))
            assert snapshot or own.store.has(step)
            own.save(step, 0, lambda: pytest.fail("this step is being saved already"))
        own.settle()

    assert world.run(work) == [None] * size
    assert [(saved.checkpoint.step, there) for saved, there in told] == [
        (1, True),
        (2, True),
        (3, True),
    ]
    assert all(saved.bytes > 0 and saved.blocking_seconds > 0 for saved, _ in told)
    assert all(saved.writing_seconds > 0 for saved, _ in told)
    found = newest(folder)
    assert all(same(found.tensors(part), values) for part, values in tensors(3.0).items())
    assert found.state() == {"value": 3.0}
    assert found.manifest.world_size == size


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    ("part", "name", "row"),
    [
        ("model", "weight", 0),
        ("model", "weight", 7),
        ("model", "seen", None),
        ("optimizer", "weight/exp_avg", 7),
    ],
)
def test_non_finite_value_is_never_committed(folder, part, name, row, bad):
    """All ranks raise, whichever rank has the value, and the error names the tensor."""
    world = World(2)
    poisoned = tensors(2.0)
    poisoned[part][name][... if row is None else row] = bad

    def work(rank):
        own = saver(world, rank, CheckpointStore(folder, keep=2))
        own.save(1, 0, lambda: state(1.0, rank, 2))
        own.save(2, 0, lambda: state(2.0, rank, 2, **poisoned))
        own.settle()

    errors = world.run(work)

    assert [type(error) for error in errors] == [NonFiniteState] * 2
    assert all(f"{part}/{name}" in str(error) and error.step == 2 for error in errors)
    assert newest(folder).step == 1


def test_ranks_raise_the_error_of_the_rank_that_failed(folder):
    error = pickle.loads(pickle.dumps(NonFiniteState(7, "model/weight")))

    assert (error.step, error.tensor) == (7, "model/weight")
    report = RankError(
        rank=0, time=0, kind=type(error).__name__, message=str(error), traceback="", step=6
    )
    assert classify([report], {0: 1}, {}).failure_class is FailureClass.DIVERGENCE


def test_write_failure_on_one_rank_fails_all_ranks(folder, tmp_path):
    """Rank 0 does not wait for a file that never comes."""
    world = World(2)
    (tmp_path / "file").touch()

    def work(rank):
        store = CheckpointStore(tmp_path / "file" / "below" if rank else folder, keep=2)
        own = saver(world, rank, store)
        own.save(1, 0, lambda: state(1.0, rank, 2))
        while not world.gather([own.failed]).count(True):
            pass
        own.settle()

    errors = world.run(work)

    assert [isinstance(error, StorageError) for error in errors] == [True] * 2
    assert all("file/below" in str(error) for error in errors)
    assert newest(folder) is None


def test_error_on_one_rank_reaches_the_others(folder):
    world = World(2)

    def work(rank):
        own = saver(world, rank, CheckpointStore(folder, keep=2))
        kind = torch.complex64 if rank else torch.float32
        own.save(1, 0, lambda: state(1.0, rank, 2, model={"weight": torch.zeros(8, dtype=kind)}))
        own.settle()

    told, own = world.run(work)

    assert isinstance(own, KeyError)
    assert "KeyError" in str(told)


def test_non_finite_weight_fails_training_as_a_divergence(make_bench, monkeypatch):
    """The loss does not depend on this weight, so only the snapshot shows the bad value."""
    bench = make_bench(
        task="support.faults:SilentWeight",
        training={"micro_batch_size": 4, "save_steps": 1, "eval_steps": 9},
    )
    monkeypatch.setenv("FAULT_STEP", "4")
    folder = bench.attempt()

    assert main(str(folder)) == 1

    (error,) = AttemptFolder(folder).errors()
    assert error.kind == "NonFiniteState"
    assert "embed_tokens" in error.message
    # Three steps were completed. The batch of the fourth is the one that may be skipped.
    assert error.step == 3
    assert [event.step for event in events_of(bench.workspace, TrainingDiverged)] == [4]
    assert [event.step for event in events_of(bench.workspace, CheckpointSaved)] == [1, 2, 3]
    assert newest(bench.workspace.checkpoints).step == 3


@pytest.mark.slow
def test_training_keeps_its_checkpoints_on_s3_and_resumes_from_there(make_bench, monkeypatch):
    recovery = {"checkpoints": "s3://bucket/all-runs/"}
    undisturbed = make_bench("undisturbed")
    undisturbed.train_here()
    with mocked_s3(monkeypatch):
        bench = make_bench(training={"load_best_model_at_end": False}, recovery=recovery)
        bench.train_here()
        assert [event.checkpoint for event in events_of(bench.workspace, CheckpointSaved)] == [
            f"s3://bucket/all-runs/tiny/step-{step:08d}" for step in (3, 6)
        ]
        storage = open_storage("s3://bucket/all-runs/tiny/step-00000006")
        storage.delete("COMMIT")
        found = newest(checkpoints_of(bench.config))
        assert found.step == 3

        bench.train_here(2, resume_from=found)

    assert not bench.workspace.checkpoints.exists()
    expected = losses_of(undisturbed.workspace)
    assert losses_of(bench.workspace) == expected


KEEPS_EVERYTHING = json.dumps(
    {
        "Version": "2012-10-17",
        "Statement": [
            {"Effect": "Allow", "Action": "s3:*", "Resource": "*"},
            {"Effect": "Deny", "Action": "s3:Delete*", "Resource": "*"},
        ],
    }
)


@pytest.mark.slow
def test_bucket_without_delete_permission_keeps_old_checkpoints_and_training_continues(monkeypatch):
    """moto's IAM denies the deletes. Every attempt once failed after its first checkpoint."""
    world, warned = World(1), []
    with mocked_s3(monkeypatch) as client:
        client.put_object(Bucket="bucket", Key="run/step-00000009/torn", Body=b"")
        iam = boto3.client("iam")
        iam.create_user(UserName="trainer")
        iam.put_user_policy(UserName="trainer", PolicyName="p", PolicyDocument=KEEPS_EVERYTHING)
        keys = iam.create_access_key(UserName="trainer")["AccessKey"]
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", keys["AccessKeyId"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", keys["SecretAccessKey"])

        def work(rank):
            own = Saver(
                CheckpointStore("s3://bucket/run", keep=1),
                rank=0,
                world_size=1,
                gather=world.gather,
                on_saved=lambda saved: None,
                on_warning=warned.append,
            )
            for step in (1, 2, 3):
                own.save(step, step, lambda step=step: state(float(step)))
            own.settle()

        checked = set_initial_no_auth_action_count(0)
        assert checked(world.run)(work) == [None]
        assert [item.step for item in committed("s3://bucket/run")] == [1, 2, 3]
        assert newest("s3://bucket/run").step == 3
    (told,) = warned
    assert "old checkpoints in s3://bucket/run cannot be deleted" in told
    assert "AccessDenied" in told


def test_busy_server_while_old_checkpoints_are_deleted_is_no_missing_permission(tmp_path):
    """botocore's own errors: each kind of failure is one warning."""
    busy, denied = (
        ClientError({"Error": {"Code": code, "Message": ""}}, "DeleteObject")
        for code in ("SlowDown", "AccessDenied")
    )
    errors, warned, world = [busy, busy, denied, denied], [], World(1)
    client = SimpleNamespace(delete_object=lambda **_: raise_(errors.pop(0)))
    bucket = S3Storage("s3://bucket/run", client)
    store = CheckpointStore(str(tmp_path), keep=1)
    store.retain = lambda kept, best: bucket.delete("step-1/a")

    def work(rank):
        own = Saver(
            store,
            rank=0,
            world_size=1,
            gather=world.gather,
            on_saved=lambda saved: None,
            on_warning=warned.append,
        )
        for step in range(1, 5):
            own.save(step, step, lambda step=step: state(float(step)))
        own.settle()

    assert world.run(work) == [None]
    assert not errors
    first, second = warned
    assert "were not deleted: s3://bucket/run/step-1/a: SlowDown; the next save tries" in first
    assert "permission" not in first
    assert "AccessDenied; give this run permission to delete there" in second


def raise_(error):
    raise error
