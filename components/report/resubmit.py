"""The outer net: a run that lost a step with the step's pod is submitted again.

Kubeflow's own retries cannot be relied on for that: whether a pod that was evicted,
deleted or lost is tried again differs with how it went and with the version of Argo. The
exit handler runs in each of these cases, and what it submits goes on from the ledger.
It runs after a termination, too, which is never answered so.
"""

from __future__ import annotations

import json
import time
from typing import Any, Final

from steadytrain.components.report.facts import Facts, gather
from steadytrain.components.report.story import outcome
from steadytrain.components.shared.cluster import Refused, Unreachable, connect, own_pod_name
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.parameters import EACH
from steadytrain.components.shared.errors import BadInput, ServerError, StorageError
from steadytrain.components.shared.events.types import Event, Resubmitted, Warned
from steadytrain.components.shared.kubeflow.connection import Server
from steadytrain.components.shared.kubeflow.connection import connect as connect_to_kubeflow
from steadytrain.components.shared.kubeflow.listing import named, pages
from steadytrain.components.shared.patience import patiently
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.launch.termination import is_terminated
from steadytrain.components.train.lease import held

_LOST: Final = {"unfinished", "stopped"}
"""How a run stands of which a step was killed, or was asked to leave with its pod."""
_TERMINATED: Final = {"CANCELING", "CANCELED"}


def resubmit(config: RunConfig, job: str) -> Event | None:
    """Submits the pipeline again where a step was lost, as often as the configuration allows.

    Args:
        job: KFP's id of the run that ends.

    Returns:
        What there is to tell of it: a Resubmitted, or why not; None where nothing was lost, the
        run was terminated or is at work elsewhere, or this is no step on a cluster.
    """
    if not (own_pod_name() and job and config.recovery.resubmit):
        return None
    workspace = Workspace.of(config)
    facts = gather(workspace)
    if outcome(facts).state not in _LOST or held(LocalStorage(workspace.lease)):
        return None
    try:
        server = patiently(connect_to_kubeflow)
        run = patiently(lambda: server.runs.run_service_get_run(job))
        if _was_canceled(run) or is_terminated(connect()):
            return None
        return _submit(config, facts, server, run)
    except (BadInput, ServerError, Refused, Unreachable) as error:
        remedy = f"; {error.remedy}" if error.remedy else ""
        return _not_again(f"{error.message}{remedy}")


def _was_canceled(run: Any) -> bool:
    """By KFP's own words for it; the last of them is of the workflow, which still runs."""
    told = [run.state, *(moment.state for moment in run.state_history or ())]
    return not _TERMINATED.isdisjoint(told)


def _submit(config: RunConfig, facts: Facts, server: Server, run: Any) -> Event | None:
    number, limit = _take(facts, run.run_id), config.recovery.resubmit
    if number is None:
        return None
    if number > limit:
        return _not_again(
            f"that was done {limit} times without a new checkpoint (recovery.resubmit); mend "
            "what takes its pods away, then submit it again"
        )
    made = _create(server, _same(run, config))
    return Resubmitted(kfp_run=made.run_id, number=number, limit=limit)


def _create(server: Server, content: Any) -> Any:
    """Starts a run once, though the answer that it was started may be lost."""
    asked = False

    def create() -> Any:
        nonlocal asked
        found = _find(server, content) if asked else None
        asked = True
        return found or server.runs.run_service_create_run(run=content)

    return patiently(create)


def _find(server: Server, content: Any) -> Any:
    """By its description, which names the run that it takes the place of."""
    of = {"namespace": server.namespace} if server.namespace else {}
    runs = pages(
        server.runs.run_service_list_runs,
        "runs",
        filter=named("display_name", content.display_name),
        **of,
    )
    return next((run for run in runs if run.description == content.description), None)


def _same(run: Any, config: RunConfig) -> Any:
    """The same pipeline with the same parameters, for the same run of ours."""
    import kfp_server_api

    runtime = run.runtime_config
    parameters = dict(runtime.parameters or {})
    if EACH in str(parameters.get("run", "")):
        # It stands for another run each time, and this one is to go on.
        parameters["run"] = config.run_id
    version = run.pipeline_version_reference
    return kfp_server_api.V2beta1Run(
        display_name=run.display_name,
        description=f"Submitted again by the report of run {run.run_id}, which lost a step",
        experiment_id=run.experiment_id,
        pipeline_version_reference=version,
        pipeline_spec=None if version else run.pipeline_spec,
        runtime_config=kfp_server_api.V2beta1RuntimeConfig(
            parameters=parameters, pipeline_root=runtime.pipeline_root or None
        ),
        service_account=run.service_account or None,
    )


def _take(facts: Facts, job: str) -> int | None:
    """Which one in a row without a new checkpoint it is; None where `job` has had its own.

    Kept before it is submitted: an exit handler that is started twice submits once.
    """
    storage, step = LocalStorage(facts.workspace.resubmitted), facts.history.last_step
    before = [_step_of(storage, name, unreadable=step) for name in storage.list()]
    taken = json.dumps({"step": step, "time": time.time()}).encode()
    if not storage.write(f"{job}.json", taken, if_absent=True):
        return None
    return before.count(step) + 1


def _step_of(storage: LocalStorage, name: str, *, unreadable: int) -> Any:
    """The step that a note tells of; one that cannot be read counts as one of `unreadable`."""
    try:
        return json.loads(storage.read(name))["step"]
    except (ValueError, TypeError, KeyError, RecursionError, OSError, StorageError):
        return unreadable


def _not_again(reason: str) -> Warned:
    return Warned(stage="report", message=f"a step was lost; not submitted again: {reason}")
