"""How the steps are split into pods."""

from __future__ import annotations

from pydantic import Field

from steadytrain.components.shared.config.base import Section


class PipelineConfig(Section):
    """The shape of the DAG. It does not change what the steps do."""

    fuse: bool = Field(
        False,
        description="Run evaluate, gate, register and promote in one pod. This starts fewer pods, "
        "but a failure repeats all of these steps.",
    )
