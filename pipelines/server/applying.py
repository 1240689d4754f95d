"""From a file of schedules to the changes on the server."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steadytrain.components.shared.config import to_parameters
from steadytrain.components.shared.config.parameters import EACH
from steadytrain.components.shared.config.pipeline import PipelineConfig
from steadytrain.components.shared.kubeflow.connection import Server
from steadytrain.pipelines.compile import Pipeline, compile_pipeline
from steadytrain.pipelines.lint import Finding
from steadytrain.pipelines.server.declared import (
    Schedule,
    ScheduleFile,
    configuration,
    read_schedules,
)
from steadytrain.pipelines.server.schedules import Change, Desired, carry_out, plan, present
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
