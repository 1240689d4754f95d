"""What the guide to clusters says of the manifests, the Secret and the volume is so."""

from __future__ import annotations

import re

from steadytrain.pipelines.pod_names import MOUNT_PATH, NAME, SECRETS

from support.snippets import ROOT

GUIDE = (ROOT / "docs" / "guides" / "cluster.md").read_text()


def test_overlays_and_components_are_there():
    named = set(re.findall(r"^\| `overlays/([a-z-]+)`", GUIDE, re.MULTILINE))
    assert named == {path.name for path in (ROOT / "manifests" / "overlays").iterdir()}
    table = GUIDE.split("| Component | For |")[1].split("\n\n")[0]
    named = set(re.findall(r"`([a-z0-9-]+)`", "\n".join(re.findall(r"^\|[^|]+\|", table, re.M))))
    assert named == {path.name for path in (ROOT / "manifests" / "components").iterdir()}


def test_secret_is_the_one_that_steps_are_given():
    written = (ROOT / "manifests" / "create-secret.sh").read_text()
    assert f"secret generic {NAME} " in written
    named = set(re.findall(r"(MLFLOW_[A-Z_]+)=", written))
    assert named - set(SECRETS) == {"MLFLOW_FLASK_SERVER_SECRET_KEY"}
    section = GUIDE.split("## 4.")[1].split("\n## ")[0]
    named = set(re.findall(r"`((?:MLFLOW|HF|KF|STEADYTRAIN)_[A-Z_]+)`", section))
    assert named == {key for key in SECRETS if not key.startswith("AWS_")}
    assert f"output={MOUNT_PATH}" in GUIDE
