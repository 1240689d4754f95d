"""What the sinks of a training run could not send, sent at the end of the run."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import Final

from steadytrain.components.observe.otlp.sink import OtlpDelivery
from steadytrain.components.observe.tensorboard_sink import TensorBoardDelivery
from steadytrain.components.observe.wandb_sink import WandbDelivery
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import SteadytrainError
from steadytrain.components.shared.tracking.extras import is_installed
from steadytrain.components.shared.tracking.notes import warn
from steadytrain.components.shared.workspace import Workspace

FINISH_SECONDS: Final = 60.0
"""Longest time for each sink, unless a single batch takes longer."""


def send_rest(config: RunConfig, workspace: Workspace) -> bool:
    """Send what the run's sinks lack. A sink whose package is not installed here is left out.

    Returns:
        Whether everything has been sent. If not, the run's events contain a warning.
    """
    accepted = [_send(name, config, workspace) for name in config.tracking.sinks]
    return all(accepted)


def _send(sink: str, config: RunConfig, workspace: Workspace) -> bool:
    if sink not in ("otlp", "tensorboard", "wandb") or not is_installed(sink):
        return True
    deadline = time.monotonic() + FINISH_SECONDS

    def give_up() -> bool:
        return time.monotonic() > deadline

    try:
        _catch_up(sink, config, workspace, give_up)
    except SteadytrainError as error:
        warn(workspace, f"{error.message}; `steadytrain report` sends the rest to {sink}")
        return False
    return True


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
