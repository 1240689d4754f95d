"""Make the recurring runs on a server match what a file declares.

KFP cannot change a recurring run, so one that differs is replaced: the new one is created first,
then the old one is deleted. A kill between the two leaves both until somebody applies again, which
deletes the unwanted one. The other order could leave none. The server also rejects what it does not
accept while the old one still runs.

Our recurring runs have a mark in their description: the set (the file's name), the schedule's name,
and a digest of everything that was declared. Nothing else is touched.
"""

from __future__ import annotations

import contextlib
import difflib
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Literal

import kfp_server_api

from steadytrain.components.shared.config import RunConfig, load, to_parameters
from steadytrain.components.shared.config.document import parse
from steadytrain.components.shared.config.fields import leaves
from steadytrain.components.shared.config.operations import PipelineConfig
from steadytrain.components.shared.config.parameters import EACH
from steadytrain.components.shared.digest import value_digest
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.kubeflow.connection import Server
from steadytrain.components.shared.pagination import pages
from steadytrain.components.shared.tracking.batches import flatten
from steadytrain.pipelines.compile import Finding, compile_pipeline
from steadytrain.pipelines.pod_names import Pipeline
from steadytrain.pipelines.server.schedule_file import (
    Schedule,
    ScheduleFile,
    configuration,
    read_schedules,
)
from steadytrain.pipelines.server.submission import (
    Submission,
    Version,
    experiment_id,
    look_up,
    upload,
)

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
        settings = self.declared.model_dump(mode="json", exclude={"config", "overrides"})
        parts = [self.experiment, settings, self.cron, self.parameters, self.version.name]
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
    listing = [
        Actual(mark["set"], mark["name"], mark["digest"], item)
        for item in listed
        if (mark := _MARK.search(item.description or ""))
    ]
    return sorted(listing, key=lambda item: (item.group, item.name, str(item.item.created_at)))


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
    result = [item for item in there if name in (item.name, f"{item.group}/{item.name}")]
    known = ", ".join(dict.fromkeys(f"{item.group}/{item.name}" for item in there))
    if not result:
        raise BadInput(
            f"schedule {name!r}: not on the server",
            remedy=f"steadytrain's schedules there: {known or 'none'}",
        )
    if len({item.group for item in result}) > 1:
        raise BadInput(f"schedule {name!r} is in several sets", remedy=f"one of {known}")
    return result


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


_Shape = tuple[Pipeline, str]
"""A pipeline, and its shape as JSON. Schedules of the same shape share a version."""


@dataclass(frozen=True)
class Declaration:
    """A valid file of schedules.

    parameters: the pipeline's parameters, by schedule name.
    shapes: the shape of the pipeline, by schedule name.
    """

    file: ScheduleFile
    parameters: dict[str, dict[str, Any]]
    shapes: dict[str, PipelineConfig]

    @classmethod
    def read(cls, path: Path) -> Declaration:
        """Read a file and the configurations that it names.

        Raises:
            BadInput: with every problem in the file, or in a configuration.
        """
        file = read_schedules(path)
        parameters, shapes = {}, {}
        for schedule in file.schedules:
            config = Submission.of(
                configuration(schedule, path.parent), pipeline=schedule.pipeline
            ).config
            # Each time needs its own run name: the same name would continue a run that is already
            # done.
            run = f"{schedule.name}-{EACH}"
            parameters[schedule.name] = to_parameters(config, run=run)
            shapes[schedule.name] = config.pipeline
        return cls(file, parameters, shapes)

    def plan(
        self,
        server: Server,
        *,
        uploading: bool,
        notify: Callable[[Finding], object] = lambda _: None,
    ) -> list[Change]:
        """Return what to change on the server. This only uploads, and only if asked to.

        Args:
            uploading: whether to upload the pipeline if the server does not have it.
            notify: called with each warning about the pipeline.
        """
        versions: dict[_Shape, Version] = {}
        for shape in {self._shape(schedule) for schedule in self.file.schedules}:
            name, text = shape
            pods = PipelineConfig.model_validate_json(text)
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "pipeline.yaml")
                compile_pipeline(path, notify, pipeline=name, shape=pods)
                versions[shape] = upload(server, path) if uploading else look_up(server, path)
        return plan(self._wanted(versions), present(server), self.file.name)

    def _shape(self, schedule: Schedule) -> _Shape:
        return schedule.pipeline, self.shapes[schedule.name].model_dump_json()

    def _wanted(self, versions: Mapping[_Shape, Version]) -> list[Desired]:
        file = self.file
        return [
            Desired(
                group=file.name,
                experiment=file.experiment,
                declared=item,
                cron=file.cron(item),
                parameters=self.parameters[item.name],
                version=versions[self._shape(item)],
            )
            for item in file.schedules
        ]


def apply(server: Server, declaration: Declaration) -> list[Change]:
    """Make the server's schedules match the file. Safe to repeat.

    Returns:
        What was done, one entry for each schedule.
    """
    changes = declaration.plan(server, uploading=True)
    for change in changes:
        carry_out(server, change)
    return changes


_LEFT_OPEN: Final = ("pipeline_root", "service_account")


def described(item: Actual | Desired) -> dict[str, str]:
    """Describe a schedule by field, in the same form for a present and a wanted one."""
    return _describe_desired(item) if isinstance(item, Desired) else _describe_present(item)


def _describe_desired(desired: Desired) -> dict[str, str]:
    declared = desired.declared
    return {
        "when": desired.cron or f"every {declared.interval_seconds} s",
        "end": _moment(declared.end),
        "catch_up": str(declared.catch_up),
        "max_concurrency": str(declared.max_concurrency),
        "version": desired.version.version_id or "to be uploaded",
        "pipeline_root": declared.pipeline_root,
        "service_account": declared.service_account,
        **_parameters(desired.parameters),
    }


def _describe_present(present: Actual) -> dict[str, str]:
    item = present.item
    trigger = item.trigger.cron_schedule or item.trigger.periodic_schedule
    cron = item.trigger.cron_schedule and item.trigger.cron_schedule.cron
    parameters = (item.runtime_config and item.runtime_config.parameters) or {}
    return {
        "when": cron or f"every {trigger.interval_second} s",
        "end": _moment(trigger.end_time),
        "catch_up": str(not item.no_catchup),
        "max_concurrency": str(item.max_concurrency),
        "version": str(item.pipeline_version_reference.pipeline_version_id),
        "pipeline_root": str((item.runtime_config and item.runtime_config.pipeline_root) or ""),
        "service_account": item.service_account or "",
        **_parameters(parameters),
    }


def differences(change: Change) -> Iterator[str]:
    """Yield what differs, field by field."""
    old = described(change.surplus[0]) if change.surplus else {}
    new = described(change.desired) if change.desired else {}
    for key in dict.fromkeys([*old, *new]):
        before, after = old.get(key, ""), new.get(key, "")
        # A field that is not declared keeps the server's value.
        if before == after or (new and not after and key in _LEFT_OPEN):
            continue
        if "\n" in before + after:
            yield f"{key}:"
            yield from _lines(before, after)
        else:
            yield f"{key}: {before or '-'} -> {after or '-'}"


def _lines(before: str, after: str) -> Iterator[str]:
    changed = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    yield from (f"  {line}" for line in changed if not line.startswith(("---", "+++", "@@")))


def _settings(config: RunConfig) -> Iterator[str]:
    """Yield a line for each field that does not have its default."""
    content = config.model_dump(mode="json", exclude_defaults=True)
    yield from (f"{field}: {value}" for field, value in flatten(content))


def _parameters(parameters: Mapping[str, Any]) -> dict[str, str]:
    described = {f"parameter {key}": str(value) for key, value in parameters.items()}
    whole = described.get("parameter config", "")
    # A preset's name is one line. A full configuration is mostly defaults, which are left out.
    if "\n" in whole:
        # With the empty line, even a single field is compared line by line.
        described["parameter config"] = "\n".join(["", *_settings_in(whole)])
    return described


def _settings_in(text: str) -> Iterator[str]:
    """Yield a line for each field of a configuration that does not have its default.

    Another version of steadytrain may have written it, with fields that this one does not accept.
    """
    try:
        yield from _settings(load(text))
    except BadInput:
        defaults = {field.name: _as_stored(field.default) for field in leaves(RunConfig)}
        with contextlib.suppress(BadInput):
            for name, value in flatten(parse(text, "it")):
                if value not in ("[]", "{}") and defaults.get(name) != _as_stored(value):
                    yield f"{name}: {value}"


def _as_stored(value: Any) -> str:
    """Return a value's text, the same for a default and for what YAML makes of it."""
    text = str(list(value) if isinstance(value, tuple) else value)
    try:
        return str(float(text))
    except ValueError:
        return text


def _moment(moment: datetime | None) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}" if moment else ""
