"""From the DAG to the YAML that a Kubeflow server takes as it is."""

from __future__ import annotations

import warnings
from pathlib import Path


def compile_pipeline(path: Path) -> Path:
    """Writes the compiled main DAG; identical bytes from run to run.

    Args:
        path: the YAML file to write; its folder is made.
    """
    # kfp takes 1.5 s to import, and asks about a decorator's return types.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from kfp import compiler

        from steadytrain.pipelines.finetune import finetune

    path.parent.mkdir(parents=True, exist_ok=True)
    compiler.Compiler().compile(finetune, str(path))
    return path
