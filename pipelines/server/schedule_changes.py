"""From a file of schedules to the changes on the server."""

from __future__ import annotations

import contextlib
import difflib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from steadytrain.components.shared.config import RunConfig, load, to_parameters
from steadytrain.components.shared.config.document import parse
from steadytrain.components.shared.config.fields import leaves
from steadytrain.components.shared.config.operations import PipelineConfig
from steadytrain.components.shared.config.parameters import EACH
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.kubeflow.connection import Server
from steadytrain.components.shared.tracking.batches import flatten
from steadytrain.pipelines.compile import Pipeline, compile_pipeline
from steadytrain.pipelines.lint import Finding
from steadytrain.pipelines.server.schedule_file import (
    Schedule,
    ScheduleFile,
    configuration,
    read_schedules,
)
from steadytrain.pipelines.server.schedules import Actual, Change, Desired, carry_out, plan, present
from steadytrain.pipelines.server.submission import Submission
from steadytrain.pipelines.server.upload import Version, look_up, upload

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
        tell: Callable[[Finding], object] = lambda _: None,
    ) -> list[Change]:
        """Return what to change on the server. This only uploads, and only if asked to.

        Args:
            uploading: whether to upload the pipeline if the server does not have it.
            tell: called with each warning about the pipeline.
        """
        versions: dict[_Shape, Version] = {}
        for shape in {self._shape(schedule) for schedule in self.file.schedules}:
            name, text = shape
            pods = PipelineConfig.model_validate_json(text)
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "pipeline.yaml")
                compile_pipeline(path, tell, pipeline=name, shape=pods)
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
    return _describe_desired(item) if isinstance(item, Desired) else _told_present(item)


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


def _told_present(present: Actual) -> dict[str, str]:
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
