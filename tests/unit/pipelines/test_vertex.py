"""The lint for Vertex AI Pipelines names what Vertex does not have, and nothing else."""

import warnings

import pytest
import yaml
from typer.testing import CliRunner

from steadytrain.pipelines.cli import app
from steadytrain.pipelines.compile import lint_vertex, read_pipeline

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from kfp import compiler, dsl, kubernetes

OURS = "europe-west1-docker.pkg.dev/my-project/steadytrain"


@pytest.fixture
def findings(tmp_path):
    """Compile a pipeline of one task, changed by a function, and lint it."""

    def find(change=lambda task: None, image=f"{OURS}/train:1.0"):
        @dsl.component(base_image=image, install_kfp_package=False)
        def work():
            pass

        def body():
            change(work())

        compiler.Compiler().compile(dsl.pipeline(name="p")(body), str(tmp_path / "p.yaml"))
        return lint_vertex(*read_pipeline(tmp_path / "p.yaml"))

    return find


def mount(task):
    kubernetes.mount_pvc(task, "data", "/mnt")


def secret(task):
    kubernetes.use_secret_as_env(task, "s", {"KEY": "VALUE"})


def select(task):
    kubernetes.add_node_selector(task, "gpu", "a100")


def label(task):
    kubernetes.add_pod_label(task, "a", "b")


def test_plain_pipeline_in_its_registry_has_no_findings(findings):
    assert findings() == []


@pytest.mark.parametrize("image", ["eu.gcr.io/p/x:1", "gcr.io/p/x:1", "a-docker.pkg.dev/p/r/x:1"])
def test_images_of_google_are_taken(findings, image):
    assert findings(image=image) == []


@pytest.mark.parametrize("image", ["steadytrain/train:0.1.0", "ghcr.io/a/gcr.io/x:1", "x:1"])
def test_other_images_are_named(findings, image):
    (found,) = findings(image=image)
    assert (found.location, found.unsafe) == (f"image {image}", True)


@pytest.mark.parametrize(
    ("change", "part"), [(mount, "a volume"), (secret, "a Kubernetes Secret"), (select, "nodes")]
)
def test_objects_of_a_cluster_are_named(findings, change, part):
    file, found = findings(change)
    assert "a second document" in file.message
    assert (found.location, part in found.message, found.unsafe) == (
        "executor exec-work",
        True,
        True,
    )


def test_ignored_settings_are_warnings_and_labels_are_nothing(findings):
    file, found = findings(lambda task: kubernetes.set_timeout(task, 60))
    assert (found.unsafe, "which Vertex ignores" in found.message) == (False, True)
    (file,) = findings(label)
    assert file.location == "the file"


def test_command_writes_the_file_and_fails_with_what_vertex_lacks(tmp_path):
    path = tmp_path / "p.yaml"
    done = CliRunner().invoke(app, ["compile", "-o", str(path), "--check", "vertex"])
    assert done.exit_code == 1
    for part in ("executor exec-train: mounts a volume", "image steadytrain/train:", "fix: "):
        assert part in done.output
    assert len(list(yaml.safe_load_all(path.read_text()))) == 2
    assert CliRunner().invoke(app, ["compile", "-o", str(path)]).exit_code == 0
