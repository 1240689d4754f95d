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
        "steadytrain.pipelines.finetune",
        "steadytrain.pipelines.retrain",
        "steadytrain.pipelines.local",
        "steadytrain.pipelines.compile",
        "steadytrain.pipelines.cluster.doctor",
        "steadytrain.pipelines.server.triggers",
        "steadytrain.pipelines.view.serve",
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


@pytest.mark.slow
def test_dag_is_the_same_without_the_clients_of_kfp(tmp_path):
    compile_ours = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from steadytrain.pipelines.compile import compile_pipeline\n"
        "from steadytrain.pipelines.light_kfp import import_kfp\n"
    )
    told = "print(*[name for name in ('kfp.client', '_KFP_RUNTIME') if name in place])"
    found = []
    for name, first in (("light", "import_kfp()"), ("whole", "import kfp")):
        code = f"{compile_ours}{first}\ncompile_pipeline(Path({str(tmp_path / name)!r}))\n"
        code += f"place = {{*sys.modules, *os.environ}}\n{told}"
        line = [sys.executable, "-c", code]
        found.append(subprocess.run(line, capture_output=True, text=True, check=True).stdout)
    assert found == ["\n", "kfp.client\n"]
    assert (tmp_path / "light").read_bytes() == (tmp_path / "whole").read_bytes()
