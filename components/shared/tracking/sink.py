"""MLflow as a sink of the event stream."""

from __future__ import annotations

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.tracking.connect import open_tracking, short_timeouts
from steadytrain.components.shared.tracking.delivery import Delivery
from steadytrain.components.shared.tracking.pull import BATCH_SECONDS, CLOSE_SECONDS, PullSink
from steadytrain.components.shared.tracking.run import continue_run
from steadytrain.components.shared.workspace import Workspace


class MlflowSink(PullSink):
    """Sends training events to MLflow, including those that an earlier sink could not send.

    Args:
        config: the run's configuration.
        workspace: the run's workspace.
        batch_seconds, close_seconds: as for `PullSink`.
    """

    def __init__(
        self,
        config: RunConfig,
        workspace: Workspace,
        *,
        batch_seconds: float = BATCH_SECONDS,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        def deliver() -> Delivery:
            tracking = open_tracking(config, workspace)
            return Delivery(tracking, workspace, continue_run(tracking, config, workspace))

        super().__init__(
            "MLflow",
            workspace,
            deliver,
            around=short_timeouts,
            batch_seconds=batch_seconds,
            close_seconds=close_seconds,
        )
