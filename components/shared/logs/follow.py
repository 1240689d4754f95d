"""Writes a run's log while a step works, from a thread that cannot delay the step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

from steadytrain.components.shared.cluster import this_pod_name
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.operations import LogFormat
from steadytrain.components.shared.events import Cursor
from steadytrain.components.shared.logs.lines import Log
from steadytrain.components.shared.periodic import Periodic
from steadytrain.components.shared.workspace import Workspace

POLL_SECONDS = 0.5
CLOSE_SECONDS = 5.0
"""How long the end of a step waits for a reader of its output that hangs."""


@contextlib.contextmanager
def following(config: RunConfig, workspace: Workspace) -> Iterator[None]:
    """Write the events of the run that come while the block runs, if the step writes a log."""
    form = step_format(config)
    if form is None:
        yield
        return
    cursor, log = Cursor(workspace.events), Log(workspace.run_id, form)
    cursor.skip_to_end()

    def relay() -> None:
        for event in cursor.new():
            log.emit(event)

    # If nobody reads the output any more, the step continues without a log.
    unread = partial(contextlib.suppress, OSError, ValueError)
    thread = Periodic("log", relay, every=POLL_SECONDS, finish=relay, around=unread)
    try:
        yield
    finally:
        thread.end(CLOSE_SECONDS)


def step_format(config: RunConfig) -> LogFormat | None:
    """Return the format of a step's log.

    None on a machine of your own, where the command that started the run shows it.
    """
    chosen = config.observability.logs
    if chosen == "auto":
        return "json" if this_pod_name() else None
    return chosen
