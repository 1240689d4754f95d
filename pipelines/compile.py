"""Compile a pipeline to YAML that a Kubeflow server accepts as is."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from steadytrain.components.shared.config.operations import PipelineConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.storage.local import local_errors, write_requested
from steadytrain.pipelines.lint import Finding, UnsafePipeline, lint, read_pipeline
from steadytrain.pipelines.pod_names import Pipeline

USUAL: Final = PipelineConfig()


def compile_pipeline(
    path: Path,
    tell: Callable[[Finding], object] = lambda _: None,
    *,
    pipeline: Pipeline = "finetune",
    shape: PipelineConfig = USUAL,
) -> Path:
    """Compile a pipeline and write it as YAML. Every run writes identical bytes.

    Args:
        path: the YAML file to write; its folder is created.
        tell: called with each warning: something unwise on a server, although nothing breaks.
        pipeline: the main pipeline, the one that looks for new data first, the one that tunes, or
            the one that cross-validates.
        shape: how it is split into pods, and what they reserve.

    Raises:
        UnsafePipeline: the pipeline would break on a server; nothing is written.
        BadInput: the file cannot be written, or no folder for temporary files can.
        StorageError: there is no space for temporary files.
    """
    # Importing kfp takes 1.5 s, and it warns about a decorator's return types.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from kfp import compiler

        from steadytrain.pipelines.dags import pipeline_component

        dag = pipeline_component(pipeline, shape)

    with _temporary_folder() as folder:
        compiled = Path(folder, "pipeline.yaml")
        compiler.Compiler().compile(dag, str(compiled))
        for finding in checked(compiled):
            tell(finding)
        write_requested(path, compiled.read_bytes(), "--output")
    return path


@contextlib.contextmanager
def _temporary_folder() -> Iterator[str]:
    try:
        place = Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise BadInput(
            f"no folder for temporary files can be written: {error.strerror}",
            remedy="free space in one of them, or set TMPDIR to another",
        ) from error
    with local_errors("write", place), tempfile.TemporaryDirectory(dir=place) as folder:
        yield folder


def checked(path: Path) -> list[Finding]:
    """Return the warnings for a compiled file.

    Raises:
        BadInput: the file is not a compiled pipeline.
        UnsafePipeline: the pipeline would break on a server.
    """
    findings = lint(*read_pipeline(path))
    if any(finding.unsafe for finding in findings):
        raise UnsafePipeline(findings)
    return findings
