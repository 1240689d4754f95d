"""The last safety net: a run that lost a step together with its pod is submitted again.

Kubeflow's own retries are not reliable here: whether an evicted, deleted or lost pod is retried
depends on how it was lost and on the version of Argo. The exit handler runs in each of these
cases, and the run that it submits resumes from the ledger. It also runs after a termination,
which is never resubmitted.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, Final, Literal

from pydantic import BaseModel, Field

from steadytrain.components.shared.cluster import Refused, Unreachable, connect, this_pod_name
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.parameters import name_for
from steadytrain.components.shared.errors import BadInput, ServerError, StorageError, Unreadable
from steadytrain.components.shared.events.types import Event, Resubmitted, Warned
from steadytrain.components.shared.kubeflow.connection import Server
from steadytrain.components.shared.kubeflow.connection import connect as connect_to_kubeflow
from steadytrain.components.shared.lease import is_held, lock
from steadytrain.components.shared.pagination import named, pages
from steadytrain.components.shared.retry import retry
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.launch.own_pod import termination

_TERMINATED: Final = {"CANCELING", "CANCELED"}


def may_resubmit(config: RunConfig, job: str) -> bool:
    """Return whether this is a step on a cluster whose run is resubmitted after a loss.

    Args:
        job: KFP's id of the run that ends; "" if it is not a step of a pipeline.
    """
    return bool(this_pod_name() and job and config.recovery.resubmit)


def resubmit(config: RunConfig, job: str, last_step: int) -> Event | None:
    """Resubmit the pipeline of a run that lost a step, as often as the configuration allows.

    Args:
        job: KFP's id of the run that ends.
        last_step: of the run's newest checkpoint; 0 without one. For a study, how much its log
            holds.

    Returns:
        A Resubmitted event, or a warning that says why not. None if the run was terminated, is
        active elsewhere, or this exit handler already resubmitted it.
    """
    workspace = Workspace.of(config)
    if is_held(LocalStorage(workspace.lease)):
        return None
    try:
        server = retry(connect_to_kubeflow)
        run = retry(lambda: server.runs.run_service_get_run(job))
        if _was_canceled(run) or termination(connect()):
            return None
        return _submit(config, last_step, server, run)
    except (BadInput, ServerError, Refused, Unreachable) as error:
        remedy = f"; {error.remedy}" if error.remedy else ""
        return _not_again(f"{error.message}{remedy}")


def _was_canceled(run: Any) -> bool:
    """Return whether KFP reports the run as canceled, now or in its history.

    Checks the history too, because the newest state is that of the workflow, which still runs.
    """
    states = [run.state, *(moment.state for moment in run.state_history or ())]
    return not _TERMINATED.isdisjoint(states)


def _submit(config: RunConfig, last_step: int, server: Server, run: Any) -> Event | None:
    workspace, limit = Workspace.of(config), config.recovery.resubmit
    notes, name = LocalStorage(workspace.resubmitted), f"{run.run_id}.json"
    # If an exit handler dies after it has asked, the next one finds its note, and its run if there
    # is one. The lock keeps them from asking at the same time.
    with lock(str(workspace.locks), f"resubmit-{run.run_id}"):
        note = _note(notes, name, last_step)
        if note.state != "asked":
            return None
        if note.number > limit:
            _write(notes, name, note.model_copy(update={"state": "refused"}))
            return _not_again(
                f"it was resubmitted {limit} times without a new checkpoint (recovery.resubmit); "
                "fix what removes its pods, then submit it again"
            )
        _write(notes, name, note)
        made = _create(server, _same(run))
        _write(notes, name, note.model_copy(update={"state": "submitted"}))
    return Resubmitted(kfp_run=made.run_id, number=note.number, limit=limit)


def _create(server: Server, content: Any) -> Any:
    """Start a run exactly once, even if a reply of the server is lost."""
    return retry(lambda: _find(server, content) or server.runs.run_service_create_run(run=content))


def _find(server: Server, content: Any) -> Any:
    return continuation(server, content.display_name, content.description)


def continuation(server: Server, name: str, description: str) -> Any:
    """Return the run on the server that continues another one; None if there is none.

    Args:
        name: the display name that both have.
        description: as `describes` returns it.
    """
    of = {"namespace": server.namespace} if server.namespace else {}
    runs = pages(
        server.runs.run_service_list_runs, "runs", filter=named("display_name", name), **of
    )
    return next((run for run in runs if run.description == description), None)


def describes(run_id: str) -> str:
    """Return the description of the run that continues a run on the server."""
    return f"Resubmitted by the report of run {run_id}, which lost a step"


def _same(run: Any) -> Any:
    """Build the same pipeline run with the same parameters, for the same steadytrain run."""
    import kfp_server_api

    runtime = run.runtime_config
    parameters = dict(runtime.parameters or {})
    if "run" in parameters:
        # A placeholder would create a new run, but this one must be resumed.
        parameters["run"] = name_for(str(parameters["run"]), run.run_id)
    version = run.pipeline_version_reference
    return kfp_server_api.V2beta1Run(
        display_name=run.display_name,
        description=describes(run.run_id),
        experiment_id=run.experiment_id,
        pipeline_version_reference=version,
        pipeline_spec=None if version else run.pipeline_spec,
        runtime_config=kfp_server_api.V2beta1RuntimeConfig(
            parameters=parameters, pipeline_root=runtime.pipeline_root or None
        ),
        service_account=run.service_account or None,
    )


class _Note(BaseModel):
    """What became of a run that lost a step.

    step: of its newest checkpoint.
    number: of the submission, counted since the last new checkpoint.
    state: "asked" until the server has confirmed the submission.
    """

    step: int
    number: int = 0
    time: float = Field(default_factory=time.time)
    state: Literal["asked", "submitted", "refused"] = "submitted"


def _note(notes: LocalStorage, name: str, step: int) -> _Note:
    """Return the note about a run, or a new one. A damaged one counts as asked."""
    with contextlib.suppress(FileNotFoundError, ValueError, Unreadable):
        return _Note.model_validate_json(notes.read(name))
    others = (other for other in notes.list() if other != name)
    before = [_step_of(notes, other, unreadable=step) for other in others]
    return _Note(step=step, number=before.count(step) + 1, state="asked")


def _write(notes: LocalStorage, name: str, note: _Note) -> None:
    notes.write(name, note.model_dump_json().encode())


def _step_of(notes: LocalStorage, name: str, *, unreadable: int) -> int:
    """Return the step in a note; an unreadable note counts as `unreadable`."""
    try:
        return _Note.model_validate_json(notes.read(name)).step
    except (ValueError, OSError, StorageError):
        return unreadable


def _not_again(reason: str) -> Warned:
    return Warned(
        stage="report", message=f"a step was lost, and the run was not resubmitted: {reason}"
    )
