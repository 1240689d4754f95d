"""Pipelines compiled for real, once per process because compiling takes seconds."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

from steadytrain.components.shared.config.operations import PipelineConfig
from steadytrain.pipelines.compile import Finding, compile_pipeline
from steadytrain.pipelines.pod_names import Pipeline


@functools.cache
def _compiled(pipeline: Pipeline, fuse: bool) -> tuple[bytes, tuple[Finding, ...]]:
    told: list[Finding] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "pipeline.yaml")
        compile_pipeline(path, told.append, pipeline=pipeline, shape=PipelineConfig(fuse=fuse))
        return path.read_bytes(), tuple(told)


def compiled_once(
    path: Path,
    notify: Callable[[Finding], object],
    *,
    pipeline: Pipeline,
    shape: PipelineConfig,
) -> Path:
    """Do what `compile_pipeline` does, but compile each pipeline only once per process."""
    if shape.resources:
        return compile_pipeline(path, notify, pipeline=pipeline, shape=shape)
    content, told = _compiled(pipeline, shape.fuse)
    path.write_bytes(content)
    for finding in told:
        notify(finding)
    return path
