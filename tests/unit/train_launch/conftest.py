"""An attempt to run as a job, and an API server to submit it to."""

from __future__ import annotations

import pytest

from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.train.attempt import AttemptFolder, AttemptSpec
from steadytrain.components.train.launch import follow
from steadytrain.components.train.launch.follow import JobFollower
from steadytrain.components.train.launch.job import TrainJob
from steadytrain.components.train.launch.naming import FOLDER, attempt_labels, job_name
from steadytrain.components.train.launch.own_pod import OwnPod

from support.api_server import serving

MOUNTED = {"name": "volume", "mountPath": "/data"}


@pytest.fixture
def api():
    with serving() as (server, cluster):
        yield server, cluster


@pytest.fixture
def config(tmp_path):
    def make(**compute):
        recovery = compute.pop("recovery", {})
        return from_mapping(
            {
                "name": "tiny",
                "run": "tiny",
                "output": str(tmp_path),
                "data": {"source": ["unused"]},
                "model": {"config": {"model_type": "llama"}},
                "compute": {"launcher": "trainjob", "nodes": 2, **compute},
                "recovery": recovery,
            }
        )

    return make


@pytest.fixture
def spec(tmp_path):
    return AttemptSpec(
        attempt=3,
        run_id="tiny",
        config=str(tmp_path / "config.yaml"),
        data="",
        batch=BatchSettings(1),
        gradient_accumulation_steps=1,
        nodes=2,
        generation=2,
    )


@pytest.fixture
def folder(tmp_path, spec, config):
    """The attempt's folder, as its supervisor writes it."""
    (tmp_path / "config.yaml").write_text(config().to_yaml())
    made = AttemptFolder(tmp_path / "runs/tiny/attempts/0003")
    spec.save(made.spec)
    return made


@pytest.fixture
def job(config, spec, folder):
    def make(own=None, kind=TrainJob, **compute):
        made = config(**compute)
        return kind(
            name=job_name(spec.run_id, spec.attempt),
            folder=str(folder.path),
            labels=attempt_labels(spec),
            command=["python", "-m", "agent"],
            compute=made.compute,
            recovery=made.recovery,
            own=own or OwnPod(image="own:1", mounts=[MOUNTED]),
        )

    return make


@pytest.fixture
def pod(folder, spec):
    """Make a pod of the attempt like a controller and a kubelet do. By default, it is running."""

    def make(node, phase="Running", state=None, *, uid="1", **status):
        index = {"batch.kubernetes.io/job-completion-index": str(node)}
        container = {"image": "own:1", "state": state or {"running": {}}}
        return {
            "metadata": {
                "name": f"tiny-a3-node-0-{node}-abcde",
                "uid": uid,
                "creationTimestamp": "2026-01-01T00:00:00Z",
                "labels": attempt_labels(spec),
                "annotations": {FOLDER: str(folder.path), **index},
            },
            "spec": {"containers": [{"name": "node", "resources": {"limits": {"memory": "2Gi"}}}]},
            "status": {"phase": phase, "containerStatuses": [container], **status},
        }

    return make


@pytest.fixture
def follower(api, job, folder, monkeypatch):
    monkeypatch.setattr(follow, "LOOK_SECONDS", 0.01)
    told = []

    def make(**compute):
        waits = []
        made = JobFollower(api[1], job(**compute), folder, told.append, waits.append)
        made.told, made.waits = told, waits
        return made

    return make
