"""What the sinks of a training run could not send, sent at the end of the run."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Final

from steadytrain.components.observe.otlp.sink import OtlpDelivery
from steadytrain.components.observe.tensorboard_sink import TensorBoardDelivery
from steadytrain.components.observe.wandb_sink import WandbDelivery
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import SteadytrainError
from steadytrain.components.shared.tracking.notes import warn
from steadytrain.components.shared.tracking.parallel import is_installed, run_in_parallel
from steadytrain.components.shared.workspace import Workspace

_SINKS: Final = ("otlp", "tensorboard", "wandb")
FINISH_SECONDS: Final = 60.0
"""How long the sinks may send, all at the same time, before they start no further batch."""
HANGING_SECONDS: Final = 15.0
"""How much longer a batch that was started may take."""


def send_unsent(config: RunConfig, workspace: Workspace) -> bool:
    """Send what the run's sinks lack. A sink whose package is not installed here is left out.

    Returns:
        Whether everything has been sent. If not, the run's events contain a warning.
    """
    deadline = time.monotonic() + FINISH_SECONDS
    late = partial(_is_past, deadline)
    ours = (name for name in config.tracking.sinks if name in _SINKS and is_installed(name))
    works = {name: partial(_catch_up, name, config, workspace, late) for name in ours}
    failures = run_in_parallel(works, lambda _: FINISH_SECONDS + HANGING_SECONDS)
    for sink, error in failures.items():
        if not isinstance(error, SteadytrainError | TimeoutError):
            raise error
        reason = error.message if isinstance(error, SteadytrainError) else f"{sink}: {error}"
        warn(workspace, f"{reason}; `steadytrain report` sends the rest to {sink}")
    return not failures


def _is_past(deadline: float) -> bool:
    return time.monotonic() > deadline


def _catch_up(
    sink: str, config: RunConfig, workspace: Workspace, give_up: Callable[[], bool]
) -> None:
    if sink == "otlp":
        OtlpDelivery(config, workspace).catch_up(give_up=give_up)
    elif sink == "tensorboard":
        TensorBoardDelivery(workspace).catch_up(give_up=give_up)
    else:
        with closing(WandbDelivery(config, workspace)) as delivery:
            delivery.catch_up(give_up=give_up)
