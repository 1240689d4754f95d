"""Refuse a configuration that cannot continue its run, before anything of the run changes."""

from __future__ import annotations

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.recovery.ledger import Ledger
from steadytrain.components.train.recovery.settings import MAY_DIFFER, refused, stated


def check_continues(config: RunConfig) -> None:
    """Compare the configuration with the one that the run trained with before, if it did.

    The supervisor compares the data later, once they are prepared, and reports a damaged ledger.

    Raises:
        BadInput: a field differs that decides what is learned.
    """
    workspace = Workspace.of(config)
    try:
        history = Ledger(workspace).history()
    except BadInput:
        return
    if history.supervisor is None or not history.attempts:
        return
    if changed := refused(history.supervisor.settings, stated(config)):
        raise other_inputs(workspace, changed)


def other_inputs(workspace: Workspace, changed: list[str]) -> BadInput:
    """Return the error for a run that started with other data, another model or training.

    Args:
        changed: the fields with both values. May be empty if they are unknown.
    """
    problem = (
        f"run {workspace.run_id!r} in {workspace.output} was started with other data, model or "
        "training, and cannot continue with these"
    )
    return BadInput(
        ": ".join([problem, *filter(None, ["; ".join(changed)])]),
        remedy="give this run another name (run: ...), or use the configuration that it was "
        f"started with, in which these may differ: {MAY_DIFFER}; or remove {workspace.folder}",
    )
