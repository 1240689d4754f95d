"""How the work is cut into pods."""

from __future__ import annotations

from pydantic import Field

from steadytrain.components.shared.config.base import Section


class PipelineConfig(Section):
    """The shape of the DAG; it changes nothing of what is done."""

    fuse: bool = Field(
        False,
        description="evaluate, gate, register and promote in one pod: fewer pods to start, and "
        "one failure to repeat them all",
    )
