"""Pass the recorded validations of a model that is reused to the caller, as if it were trained."""

from __future__ import annotations

from collections.abc import Callable

from steadytrain.components.shared.errors import BadInput, Pruned
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import Validated
from steadytrain.components.shared.workspace import Workspace


def check_callback(on_validation: object) -> None:
    """Reject anything but a function and None.

    Raises:
        BadInput: it cannot be called.
    """
    if on_validation is not None and not callable(on_validation):
        raise BadInput(
            f"on_validation = {on_validation!r:.80} is not a function",
            remedy="give a function that takes a Validated event and returns whether to continue",
        )


def replay(workspace: Workspace, on_validation: Callable[[Validated], bool]) -> None:
    """Call a function with the validations of a run, in the order of their steps.

    A step that was validated again after a failure counts once, with its latest validation.

    Raises:
        Pruned: the function returned False.
    """
    events = read_events(workspace.events)
    latest = {event.step: event for event in events if isinstance(event, Validated)}
    for step, event in sorted(latest.items()):
        if not on_validation(event):
            raise Pruned(step)
