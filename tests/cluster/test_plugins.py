"""The DAG with the plugins of another package, in images built on top of the product's.

The images must be on the nodes: `make plugins`, then for example `kind load docker-image
plugins.test/steadytrain/step:0.1.0 plugins.test/steadytrain/train:0.1.0`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import pytest
from kubernetes.client import ApiException

from steadytrain.components.shared.config import load, to_parameters
from steadytrain.pipelines.compile import read_pipeline
from steadytrain.pipelines.pod_names import MOUNT_PATH

from support.cluster import PodFailed
from support.command import TINY_LM, wait_for
from support.fruits import SCIKIT_LEARN
from support.plugins import install_example
from support.walker import Walker

FRUITS = """
import json, random, sys
random.seed(1)
with open(sys.argv[1], "w") as file:
    for number in range(400):
        label, fruit = random.choice([("a", "apple"), ("b", "banana"), ("c", "cherry")])
        words = random.choices(["red", "green", "sweet", "sour", "ripe", "small"], k=20) + [fruit]
        random.shuffle(words)
        print(json.dumps({"text": f"{number} {' '.join(words)}", "label": label}), file=file)
"""
REGISTRY = os.environ.get("PLUGIN_REGISTRY", "plugins.test")


@pytest.fixture(scope="module")
def walker(cluster, mlflow, tmp_path_factory):
    """Return a function that starts a run of the pipeline, compiled as users do it."""
    image = f"{REGISTRY}/steadytrain/step:{version('steadytrain')}"
    try:
        cluster.run("has-plugins", {"image": image, "imagePullPolicy": "Never"}, 60)
    except PodFailed as error:
        pytest.skip(f"{image} is not on the nodes (make plugins): {error}")
    path = tmp_path_factory.mktemp("compiled") / "pipeline.yaml"
    subprocess.run(
        [sys.executable, "-m", "steadytrain.pipelines.cli", "compile", "--output", str(path)],
        env={**os.environ, "STEADYTRAIN_REGISTRY": REGISTRY},
        check=True,
    )
    compiled = read_pipeline(path)
    return lambda **more: Walker(cluster, *compiled, job=str(uuid.uuid4()), **more)


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory):
    """Install the package here, too: this machine checks the configuration."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(install_example(tmp_path_factory.mktemp("example"))))
        yield


def record(cluster, run, name):
    return json.loads(cluster.read(f"{MOUNT_PATH}/runs/{run}/records/{name}.json"))


STEPS = 40
SETS = (
    *TINY_LM,
    "training.optim=my_lion",
    "training.lr_scheduler_type=trapezoid",
    "training.learning_rate=1e-3",
    "training.order=shortest_first",
    "training.components={ema: {decay: 0.9}}",
    f"training.max_steps={STEPS}",
    "training.save_steps=2",
    "gate.metric=median_loss",
    "tracking.sinks=[event_counts, mlflow]",
    "recovery.lease_seconds=4",
    # Otherwise the second run takes the first one's model.
    "recovery.reuse_ttl_seconds=0",
    f"output={MOUNT_PATH}",
)


def start(walker, run):
    walker.run(**to_parameters(load("causal-lm", SETS), run=run))


@pytest.fixture(scope="module")
def whole(walker):
    # Other tests have runs on the same volume.
    start(walker(), "plugins-whole")
    return "plugins-whole"


def test_plugins_of_many_kinds_work_in_one_run(cluster, whole):
    assert record(cluster, whole, "gate")["metric"] == "median_loss"
    counts = json.loads(cluster.read(f"{MOUNT_PATH}/runs/{whole}/event-counts.json"))
    assert counts["TrainingStep"] == STEPS


def test_run_with_plugins_survives_a_deleted_pod_with_the_same_weights(walker, cluster, whole):
    killed = walker()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(start, killed, "plugins-killed")
        committed = f"{MOUNT_PATH}/runs/plugins-killed/checkpoints/step-*/COMMIT*"
        saved = f"ls -d {committed} 2>/dev/null || true"
        wait_for(lambda: cluster.shell("sh", "-c", saved) or running.done(), 300)
        pod = f"train-{killed.job[:8]}"
        cluster.core.delete_namespaced_pod(pod, cluster.namespace, grace_period_seconds=0)
        with pytest.raises(ApiException, match="404"):
            running.result()
    assert killed.states["train"] == "failed"

    start(walker(last="train"), "plugins-killed")
    trained = record(cluster, "plugins-killed", "train")
    assert trained["attempts"] > 1
    assert trained["weights_digest"] == record(cluster, whole, "train")["weights_digest"]


def test_trainer_of_another_package(walker, cluster, tmp_path):
    source = f"{MOUNT_PATH}/fruits.jsonl"
    cluster.shell("python", "-c", FRUITS, source)
    content = json.loads(json.dumps(SCIKIT_LEARN)) | {"output": MOUNT_PATH}
    content["data"]["source"] = [source]
    file = Path(tmp_path / "fruits.yaml")
    file.write_text(json.dumps(content))
    walker().run(**to_parameters(load(file), run="counted"))
    trained = record(cluster, "counted", "train")
    assert (trained["outcome"], trained["attempts"]) == ("finished", 1)
    assert record(cluster, "counted", "promote")["champion"]
