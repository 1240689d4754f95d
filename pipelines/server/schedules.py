"""Make the recurring runs on a server match what a file declares.

KFP cannot change a recurring run, so one that differs is replaced: the new one is created first,
then the old one is deleted. A kill between the two leaves both until somebody applies again, which
deletes the unwanted one. The other order could leave none. The server also rejects what it does not
accept while the old one still runs.

Our recurring runs have a mark in their description: the set (the file's name), the schedule's name,
and a digest of everything that was declared. Nothing else is touched.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal

import kfp_server_api

from steadytrain.components.shared.digest import value_digest
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.kubeflow.connection import Server
from steadytrain.components.shared.pagination import pages
from steadytrain.pipelines.server.schedule_file import Schedule
from steadytrain.pipelines.server.upload import Version, experiment_id

_MARK: Final = re.compile(
    r"\[steadytrain (?P<set>[a-z0-9-]+)/(?P<name>[a-z0-9-]+) (?P<digest>\w+)]\s*$"
)

Action = Literal["create", "replace", "delete", "keep"]


@dataclass(frozen=True)
class Desired:
    """A schedule as it should be on the server.

    cron: six fields in the server's zone; None for an interval.
    parameters: the pipeline's parameters for each of its runs.
    """

    group: str
    experiment: str
    declared: Schedule
    cron: str | None
    parameters: dict[str, Any]
    version: Version

    @property
    def digest(self) -> str:
        """Digest of everything that affects its runs and their times."""
        rest = self.declared.model_dump(mode="json", exclude={"config", "overrides"})
        parts = [self.experiment, rest, self.cron, self.parameters, self.version.name]
        return value_digest([*parts, self.version.pipeline])[:16]

    @property
    def description(self) -> str:
        mark = f"[steadytrain {self.group}/{self.declared.name} {self.digest}]"
        return f"{self.declared.description}\n{mark}".lstrip()


@dataclass(frozen=True)
class Actual:
    """One of our recurring runs on the server."""

    group: str
    name: str
    digest: str
    item: Any

    @property
    def enabled(self) -> bool:
        return bool(self.item.status == "ENABLED")

    @property
    def id(self) -> str:
        return str(self.item.recurring_run_id)


@dataclass(frozen=True)
class Change:
    """What to do about one schedule.

    surplus: recurring runs to delete.
    kept: the recurring run that already matches, if there is one.
    """

    action: Action
    name: str
    desired: Desired | None
    surplus: tuple[Actual, ...] = ()
    kept: Actual | None = None


def present(server: Server) -> list[Actual]:
    """Return every recurring run on the server that has our mark."""
    of = {"namespace": server.namespace} if server.namespace else {}
    listed = pages(
        server.recurring_runs.recurring_run_service_list_recurring_runs, "recurring_runs", **of
    )
    found = [
        Actual(mark["set"], mark["name"], mark["digest"], item)
        for item in listed
        if (mark := _MARK.search(item.description or ""))
    ]
    return sorted(found, key=lambda item: (item.group, item.name, str(item.item.created_at)))


def plan(desired: list[Desired], there: list[Actual], group: str) -> list[Change]:
    """Return the changes that leave exactly the wanted schedules of this set on the server."""
    mine = [item for item in there if item.group == group]
    changes = [
        _change(item, [old for old in mine if old.name == item.declared.name]) for item in desired
    ]
    names = {item.declared.name for item in desired}
    for name in sorted({item.name for item in mine} - names):
        surplus = tuple(item for item in mine if item.name == name)
        changes.append(Change("delete", name, None, surplus))
    return changes


def _change(desired: Desired, there: list[Actual]) -> Change:
    name = desired.declared.name
    kept = next((item for item in there if item.digest == desired.digest), None)
    surplus = tuple(item for item in there if item is not kept)
    if kept:
        return Change("replace" if surplus else "keep", name, desired, surplus, kept)
    return Change("replace" if there else "create", name, desired, surplus)


def carry_out(server: Server, change: Change) -> None:
    """Make one change. Safe to repeat, whatever a kill left behind."""
    if change.desired and not change.kept:
        _create(server, change.desired, change.surplus)
    for item in change.surplus:
        delete(server, item)


def delete(server: Server, item: Actual) -> None:
    """Delete a recurring run. Runs that it started continue."""
    server.recurring_runs.recurring_run_service_delete_recurring_run(item.id)


def switch(server: Server, item: Actual, *, on: bool) -> None:
    """Resume or pause a recurring run."""
    runs = server.recurring_runs
    call = (
        runs.recurring_run_service_enable_recurring_run
        if on
        else (runs.recurring_run_service_disable_recurring_run)
    )
    call(item.id)


def find(there: list[Actual], name: str) -> list[Actual]:
    """Return the recurring runs with a name, NAME or SET/NAME.

    There is more than one only if a kill left one behind.

    Raises:
        BadInput: there is none, or several sets have that name.
    """
    found = [item for item in there if name in (item.name, f"{item.group}/{item.name}")]
    known = ", ".join(dict.fromkeys(f"{item.group}/{item.name}" for item in there))
    if not found:
        raise BadInput(
            f"schedule {name!r}: not on the server",
            remedy=f"steadytrain's schedules there: {known or 'none'}",
        )
    if len({item.group for item in found}) > 1:
        raise BadInput(f"schedule {name!r} is in several sets", remedy=f"one of {known}")
    return found


def _create(server: Server, desired: Desired, old: tuple[Actual, ...]) -> None:
    # A schedule that was paused stays paused.
    paused = bool(old) and not any(item.enabled for item in old)
    declared = desired.declared
    content = kfp_server_api.V2beta1RecurringRun(
        display_name=declared.name,
        description=desired.description,
        experiment_id=experiment_id(server, desired.experiment),
        pipeline_version_reference=desired.version.reference,
        runtime_config=kfp_server_api.V2beta1RuntimeConfig(
            parameters=desired.parameters, pipeline_root=declared.pipeline_root or None
        ),
        service_account=declared.service_account or None,
        max_concurrency=str(declared.max_concurrency),
        no_catchup=not declared.catch_up,
        mode="DISABLE" if paused else "ENABLE",
        trigger=_trigger(desired, old, datetime.now(UTC)),
        **({"namespace": server.namespace} if server.namespace else {}),
    )
    server.recurring_runs.recurring_run_service_create_recurring_run(recurring_run=content)


def _trigger(desired: Desired, old: tuple[Actual, ...], now: datetime) -> Any:
    """Return when the schedule runs, such that recreating it starts no run by itself.

    If the start is in the past, the server immediately runs what it considers missed: one run
    without catch-up, or every missed run with it. So only a new schedule with catch-up keeps such a
    start.
    """
    declared, start = desired.declared, desired.declared.start
    end = declared.end.astimezone(UTC) if declared.end else None
    backfill = declared.catch_up and not old
    if desired.cron is not None:
        if start and start <= now and not backfill:
            start = None
        cron = kfp_server_api.V2beta1CronSchedule(cron=desired.cron, end_time=end)
        cron.start_time = start.astimezone(UTC) if start else None
        return kfp_server_api.V2beta1Trigger(cron_schedule=cron)
    first_run = start or (old[0].item.created_at if old else None)
    if first_run and first_run <= now and not backfill:
        # The server's first run comes one interval after the start, so the rhythm stays the same.
        beat = timedelta(seconds=declared.interval_seconds)
        first_run += (now - first_run) // beat * beat
    periodic = kfp_server_api.V2beta1PeriodicSchedule(
        interval_second=str(declared.interval_seconds), end_time=end
    )
    periodic.start_time = first_run.astimezone(UTC) if first_run else None
    return kfp_server_api.V2beta1Trigger(periodic_schedule=periodic)
