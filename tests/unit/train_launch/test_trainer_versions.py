"""Each version of Kubeflow Trainer knows every field of our manifests, by its own API models.

`make trainer-apis` installs the models; without them, these tests are skipped.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from steadytrain.components.shared.events.types import TrainingStarted, Validated
from steadytrain.components.train.loop.job_status import TrainerStatus

ROOT = Path(__file__).parents[3]
VERSIONS = re.findall(r"^TRAINER_APIS = (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)[
    0
].split()
GOLDEN = Path(__file__).with_name("golden")
READ = """
import json, sys
from kubeflow_trainer_api import models
found = []
for manifest in json.load(sys.stdin):
    model = getattr(models, "TrainerV1alpha1" + manifest.get("kind", "UpdateTrainJobStatusRequest"))
    found.append(model.from_json(json.dumps(manifest)).to_dict())
print(json.dumps(found, default=str))
"""

pytestmark = pytest.mark.slow


def installed(version):
    """Return the folder of a version's models; skip if there is none."""
    folder = ROOT / ".trainer-apis" / version
    if not folder.is_dir():
        pytest.skip(f"no models of Trainer {version}: make trainer-apis")
    return folder


def read(version, manifests):
    """Return the manifests as a version's models read them, without what they do not know."""
    folder = installed(version)
    done = subprocess.run(
        [sys.executable, "-c", READ],
        input=json.dumps(manifests),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def lost(given, found, place=""):
    """Yield the fields that the models do not have."""
    if isinstance(given, dict):
        for name, value in given.items():
            if not isinstance(found, dict) or name not in found:
                yield f"{place}.{name}"
            else:
                yield from lost(value, found[name], f"{place}.{name}")
    elif isinstance(given, list):
        if len(given) != len(found):
            yield place
        for index, (one, other) in enumerate(zip(given, found, strict=False)):
            yield from lost(one, other, f"{place}[{index}]")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["trainjob", "trainjob-configured"])
def test_every_field_is_known(version, name):
    manifests = list(yaml.safe_load_all((GOLDEN / f"{name}.yaml").read_text()))
    assert {item["kind"] for item in manifests} == {"TrainJob", "TrainingRuntime"}
    assert not list(lost(manifests, read(version, manifests)))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_field_that_was_removed_is_found(version):
    """The check itself: `numProcPerNode` of a policy is gone. The models of 2.2 take any field."""
    manifests = list(yaml.safe_load_all((GOLDEN / "trainjob.yaml").read_text()))
    runtime = next(item for item in manifests if item["kind"] == "TrainingRuntime")
    runtime["spec"]["mlPolicy"]["torch"]["numProcPerNode"] = "auto"
    fields = [field for field in lost(manifests, read(version, manifests)) if "numProc" in field]
    removed = tuple(map(int, version.split(".")[:2])) == (2, 3)
    assert bool(fields) == removed


@pytest.mark.parametrize("version", [item for item in VERSIONS if item >= "2.2"])
def test_progress_is_a_status_of_the_version(version):
    status = TrainerStatus()
    status.add(
        TrainingStarted(
            attempt=1, step=5, max_steps=10, parameters=7, device="cpu", precision="fp32"
        )
    )
    status.add(Validated(attempt=1, step=5, epoch=0.5, metrics={"loss": 2.25}, best=True))
    update = {"trainerStatus": status.as_data()}
    assert not list(lost([update], read(version, [update])))
    assert update["trainerStatus"]["progressPercentage"] == 50


@pytest.mark.parametrize("version", [item for item in VERSIONS if item >= "2.2"])
def test_guide_names_the_feature_gate_of_the_version(version):
    """With any other name, Trainer's controller ends with an error when it starts."""
    models = installed(version) / "kubeflow_trainer_api" / "models"
    text = (models / "trainer_v1alpha1_train_job_status.py").read_text()
    (gate,) = set(re.findall(r"enabling the (\w+) feature gate", text))
    assert f"`--feature-gates={gate}=true`" in (ROOT / "docs/guides/kubeflow.md").read_text()
