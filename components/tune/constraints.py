"""Whether a trial's configuration keeps the study's constraints."""

from __future__ import annotations

from steadytrain.components.memory.model import any_model_shape
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.tune import TuneConstraints


def keeps(config: RunConfig, limits: TuneConstraints) -> bool:
    """Return whether a configuration keeps the constraints.

    Raises:
        BadInput: the architecture is unknown.
    """
    return limits.parameters is None or any_model_shape(config).parameters <= limits.parameters
