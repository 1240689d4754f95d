"""Each example of the documentation runs as its page says, and ends where it says."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import yaml

from steadytrain.components.shared.config import load
from steadytrain.components.shared.records import EvaluationRecord, GateRecord
from steadytrain.pipelines.server.schedule_file import ScheduleFile

from support.snippets import ROOT, blocks

EXAMPLES = ROOT / "docs" / "examples"
NAMES = sorted(path.parent.name for path in EXAMPLES.glob("*/index.md"))


def test_examples_are_those_that_were_promised():
    assert NAMES == ["generation", "sentiment", "trades"]


@pytest.fixture(params=NAMES)
def example(request, tmp_path):
    """Return a copy of an example's folder, and the commands of its page."""
    folder = tmp_path / request.param
    shutil.copytree(EXAMPLES / request.param, folder)
    (block,) = (item for item in blocks("sh") if item.page == EXAMPLES / request.param / "index.md")
    return folder, block.text.splitlines()


def test_example_trains_what_its_page_says(example):
    folder, (write, plan, run, serve) = example
    assert write == "python make_data.py ."
    subprocess.run([sys.executable, *write.split()[1:]], cwd=folder, check=True)
    for line in (plan, run):
        done = subprocess.run(
            [sys.executable, "-m", "steadytrain.pipelines.cli", *line.split()[1:]],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=1200,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    (made,) = (folder / "steadytrain-output" / "runs").iterdir()
    expected = json.loads((folder / "expected.json").read_text())
    found = EvaluationRecord.load(made / "records" / "evaluate.json")
    value = found.metrics[expected["metric"]].value
    assert expected["at_least"] <= value <= expected["at_most"]
    assert GateRecord.load(made / "records" / "gate.json").promoted
    name = load(folder / "config.yaml").name
    assert serve == f"steadytrain serve {name}@champion"


def test_deployment_serves_the_model_and_trains_it_again(example):
    folder, _ = example
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl, which builds the overlay")
    place = EXAMPLES / folder.name / "deploy"
    done = subprocess.run(["kubectl", "kustomize", place], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    built = {
        (item["kind"], item["metadata"]["name"]): item for item in yaml.safe_load_all(done.stdout)
    }
    deployed = built["Deployment", "steadytrain-serve"]
    (container,) = deployed["spec"]["template"]["spec"]["containers"]
    name = load(folder / "config.yaml").name
    assert container["args"][:2] == ["serve", f"{name}@champion"]
    placed = {
        item["metadata"].get("namespace")
        for (kind, name), item in built.items()
        if name == "steadytrain-serve"
    }
    assert placed == {"kubeflow"}
    declared = ScheduleFile.model_validate(yaml.safe_load((place / "schedules.yaml").read_text()))
    for schedule in declared.schedules:
        again = load(place / schedule.config, schedule.overrides)
        assert again.name == name
        assert again.data.source[0].startswith("s3://")
