"""What is promised of the package: contents, light imports, a quick command."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def test_every_package_is_listed_for_the_wheel():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {
        "steadytrain." + ".".join(path.parent.relative_to(ROOT).parts)
        for top in ("components", "pipelines")
        for path in (ROOT / top).rglob("*.py")
    }
    assert sorted(listed) == sorted(found)


def test_folders_are_importable_under_one_name_only():
    assert importlib.util.find_spec("components") is None
    assert importlib.util.find_spec("pipelines") is None


@pytest.mark.parametrize(
    "module",
    [
        "steadytrain.pipelines",
        "steadytrain.pipelines.cli",
        "steadytrain.pipelines.finetune",
        "steadytrain.pipelines.retrain",
        "steadytrain.pipelines.local",
        "steadytrain.pipelines.compile",
        "steadytrain.pipelines.cluster.doctor",
        "steadytrain.pipelines.server.triggers",
        "steadytrain.components.preprocess.step",
        "steadytrain.components.evaluate.step",
        "steadytrain.components.register.step",
        "steadytrain.components.train.plan.plan",
    ],
)
def test_authoring_imports_no_torch(module):
    code = (
        f"import sys, {module}; "
        "print([name for name in ('torch', 'transformers', 'mlflow') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_loads_nothing_slow():
    code = (
        "import sys, steadytrain.pipelines.cli; "
        "print([n for n in ('kfp', 'boto3', 'torch', 'pydantic', 'mlflow') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
