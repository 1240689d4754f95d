"""The shape of the pipeline that is being built: how it is split into pods, what these reserve."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Final

from steadytrain.components.shared.config.pipeline import PipelineConfig

USUAL: Final = PipelineConfig()
_shape: ContextVar[PipelineConfig] = ContextVar("shape", default=USUAL)
current = _shape.get


@contextlib.contextmanager
def shaped(shape: PipelineConfig) -> Iterator[None]:
    """Set the shape of pipelines that are built within the block."""
    # A context variable, since KFP calls a pipeline's function only with the pipeline's parameters.
    token = _shape.set(shape)
    try:
        yield
    finally:
        _shape.reset(token)
