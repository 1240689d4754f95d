"""Change a setting of a run that is under way, at a checkpoint boundary.

A request is one file in the run's folder. The supervisor sees it, lets the ranks save a checkpoint
and end, and records the change in the ledger together with the step from which it counts. Only then
does it delete the file. So a supervisor that dies in between loses nothing and changes nothing
twice, and ranks that repeat steps from before the change repeat them with the old value.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Final

from pydantic import ValidationError

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.fields import effect_of, is_adjustable, leaves, power
from steadytrain.components.shared.config.load import from_mapping
from steadytrain.components.shared.effects import Use
from steadytrain.components.shared.errors import BadInput, Unreadable
from steadytrain.components.shared.events.types import Adjusted
from steadytrain.components.shared.records import Record
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.storage.local import set_aside
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.sizing.recipe import RATE, learning_rate
from steadytrain.components.train.recovery.history import History

_FRAMEWORK: Final = "pytorch"
"""The one whose ranks take another value while they train."""
_DECAY: Final = "training.weight_decay"


class AdjustRequest(Record):
    """A request to change a field.

    request: its id; each request has a new one.
    value: the new value, as in the configuration.
    at_step: optimizer step after which it counts; 0 means as soon as possible.
    """

    request: str
    field: str
    value: int | float
    at_step: int = 0

    def asks_for(self, other: AdjustRequest) -> bool:
        """Return whether another request asks for the same."""
        return (self.field, self.value, self.at_step) == (other.field, other.value, other.at_step)

    def __str__(self) -> str:
        after = f" after step {self.at_step:,}" if self.at_step else ""
        return f"{self.field}={power(self.value)}{after}"


def adjustable() -> list[str]:
    """Return the fields that a run can change while it trains."""
    return [item.name for item in leaves(RunConfig) if is_adjustable(item.name)]


def checked(config: RunConfig, changes: Mapping[str, object], *, at_step: int = 0) -> AdjustRequest:
    """Return the request for a change.

    Args:
        config: the run's.
        changes: the new value of each field.

    Raises:
        BadInput: one of the fields cannot change while a run trains, or the value is not valid.
    """
    for field in changes:
        _refuse_fixed(field)
    if len(changes) != 1:
        raise BadInput(
            f"--set names {len(changes)} fields", remedy=f"set one of: {', '.join(adjustable())}"
        )
    ((field, given),) = changes.items()
    if config.model.framework != _FRAMEWORK:
        raise BadInput(
            f"{field}: the run trains with model.framework {config.model.framework}, whose "
            "learners take no other value while they learn",
            remedy="start a run with another name and that value",
        )
    content = config.model_dump(mode="json")
    section, _, name = field.rpartition(".")
    content[section][name] = given
    value = getattr(getattr(from_mapping(content), section), name)
    if value is None:
        raise BadInput(f"{field} = null: it leaves the value open", remedy="give a number")
    if field == _DECAY and any(
        group.weight_decay is not None for group in config.training.param_groups
    ):
        raise BadInput(
            f"{field} cannot be adjusted: training.param_groups sets the weight decay of some "
            "parameters, which an optimizer keeps together with others of that value",
            remedy="start a run with another name and that value",
        )
    return AdjustRequest(request=secrets.token_hex(8), field=field, value=value, at_step=at_step)


def _refuse_fixed(field: str) -> None:
    effect = effect_of(field)
    if is_adjustable(field):
        return
    if Use.RESUME in effect.uses:
        why = f"it affects {effect.label}, and a run keeps it to its end"
        fix = "start a run with another name and that value"
    else:
        why = "ranks read it only when they start"
        fix = (
            "stop the run, and continue it with that value: "
            "steadytrain run OUTPUT/runs/RUN/config.yaml --set FIELD=VALUE"
        )
    raise BadInput(
        f"{field} cannot be adjusted: {why}",
        remedy=f"{fix}. A run can adjust {', '.join(adjustable())}",
    )


def submit(workspace: Workspace, wanted: AdjustRequest) -> bool:
    """Leave a request for the run's supervisor. Return False if the same one is waiting already.

    Raises:
        BadInput: another request is waiting.
        StorageError: it cannot be written.
    """
    storage, content = LocalStorage(workspace.folder), wanted.model_dump_json().encode()
    while not storage.write(workspace.adjust.name, content, if_absent=True):
        waiting, problem = pending(workspace)
        if waiting is None and not problem:
            continue  # The supervisor took it in this moment.
        if waiting is not None and waiting.asks_for(wanted):
            return False
        raise BadInput(
            problem
            or f"run {workspace.run_id!r} has not applied an earlier request yet: {waiting}",
            remedy=f"wait until it has, or take it back: steadytrain adjust {workspace.run_id} "
            "--cancel",
        )
    return True


def cancel(workspace: Workspace) -> bool:
    """Take back a request that is not applied yet. Return False if there is none."""
    there = workspace.adjust.exists()
    LocalStorage(workspace.folder).delete(workspace.adjust.name)
    return there


def pending(workspace: Workspace) -> tuple[AdjustRequest | None, str]:
    """Return the request that is waiting, or what is wrong with its file; (None, "") if neither."""
    try:
        content = LocalStorage(workspace.folder).read(workspace.adjust.name)
        return AdjustRequest.model_validate_json(content), ""
    except FileNotFoundError:
        return None, ""
    except (Unreadable, ValidationError):
        return None, f"{workspace.adjust} is not a request of steadytrain adjust"


def take(workspace: Workspace, config: RunConfig) -> tuple[AdjustRequest | None, str]:
    """Return the request to apply, or why the file that was there is set aside.

    The file is not trusted: something else than `steadytrain adjust` may have written it, or the
    run was continued with another configuration.
    """
    result, problem = pending(workspace)
    if result is not None:
        try:
            checked(config, {result.field: result.value}, at_step=result.at_step)
        except BadInput as error:
            result, problem = None, error.message
    if not problem:
        return result, ""
    return None, f"ignored the request in {set_aside(workspace.adjust)}: {problem}"


def discard(workspace: Workspace) -> None:
    """Delete a request that is recorded, or came too late."""
    LocalStorage(workspace.folder).delete(workspace.adjust.name)


def adjustment(
    request: AdjustRequest, config: RunConfig, history: History, *, attempt: int, step: int
) -> Adjusted | None:
    """Return the change that a request makes; None if it is recorded already.

    Args:
        attempt: the first attempt that knows it.
        step: the newest optimizer step that is kept.
    """
    if request.request in {item.request for item in history.adjusted}:
        return None
    start, field = max(step, request.at_step), request.field
    before: float | None
    if field != RATE:
        training, after = config.training, request.value
        before = getattr(history.settings(training, start), field.rpartition(".")[2])
    else:
        after = request.value * config.training.rate_scale
        before = history.peak(start, learning_rate(history.recipe)) if history.recipe else None
    return Adjusted(
        attempt=attempt,
        step=start,
        field=field,
        value=request.value,
        before=before,
        after=after,
        request=request.request,
    )
