"""What the package promises: its contents, light imports, and a fast command."""

from __future__ import annotations

import subprocess
import sys

import pytest


def test_folders_are_importable_under_one_name_only():
    # In another process, because a task in the current folder puts that into this one's path.
    code = "from importlib.util import find_spec as f; print(f('components'), f('pipelines'))"
    command = [sys.executable, "-P", "-c", code]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "None None\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    [
        "steadytrain.pipelines",
        "steadytrain.pipelines.cli",
        "steadytrain.pipelines.dags",
        "steadytrain.pipelines.local",
        "steadytrain.pipelines.compile",
        "steadytrain.pipelines.cluster.doctor",
        "steadytrain.pipelines.server.triggers",
        "steadytrain.pipelines.view.app",
        "steadytrain.pipelines.view.top",
        "steadytrain.components.preprocess.step",
        "steadytrain.components.evaluate.step",
        "steadytrain.components.register.step",
        "steadytrain.components.plan.plan",
    ],
)
def test_authoring_imports_no_torch(module):
    code = (
        f"import sys, {module}; "
        "print([name for name in ('torch', 'transformers', 'mlflow') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_help_loads_nothing_slow():
    code = (
        "import sys, steadytrain.pipelines.cli; "
        "print([n for n in ('kfp', 'boto3', 'torch', 'pydantic', 'mlflow') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
