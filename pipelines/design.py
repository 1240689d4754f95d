"""The pipeline of a design, read from what kfp compiles, so that it cannot differ from that.

Also the file of schedules, which the design's trigger applies.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import yaml

from steadytrain.components.plan.design import (
    Component,
    Deployment,
    PipelineConfig,
    TrainingPods,
    Trigger,
)
from steadytrain.components.shared.config import RunConfig
from steadytrain.pipelines.pod_names import MOUNT_PATH, Pipeline
from steadytrain.pipelines.server.schedule_file import Schedule, ScheduleFile

SCHEDULES: Final = "schedules.yaml"
_TRIGGERS: Final = (
    Trigger(
        kind="manual",
        command="steadytrain submit steadytrain.yaml",
        description="Start a run on a Kubeflow server now.",
    ),
    Trigger(
        kind="event",
        command="steadytrain trigger steadytrain.yaml",
        description="Start a run if the data have changed; for webhooks and CI jobs. `steadytrain "
        "watch steadytrain.yaml` looks for new data itself.",
    ),
    Trigger(
        kind="schedule",
        command=f"steadytrain schedule apply {SCHEDULES}",
        description="Start a run at each scheduled time; the run ends early without new data. The "
        "file declares the times; `steadytrain design --write` writes one that starts at 03:30 "
        "UTC.",
    ),
)


_PIPELINE: Final[Pipeline] = "finetune"


def pipeline_config(config: RunConfig, pods: TrainingPods | None) -> PipelineConfig:
    """Return the steps, triggers and deployment of a pipeline.

    Args:
        pods: those that train; None if the train step trains itself.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped]

        from steadytrain.pipelines.dags import pipeline_component

        spec = MessageToDict(pipeline_component(_PIPELINE, config.pipeline).pipeline_spec)
    return PipelineConfig(
        orchestrator="kubeflow_pipelines",
        pipeline=_PIPELINE,
        steps=list(_steps(spec, spec["root"])),
        triggers=list(_TRIGGERS),
        deployment=Deployment(
            compile="steadytrain compile --output pipeline.yaml",
            submit="steadytrain submit steadytrain.yaml",
            volume_mount=MOUNT_PATH,
            training_pods=pods,
        ),
    )


def schedules(config: RunConfig) -> str:
    """Return the text of a file that schedules steadytrain.yaml, next to it, for each night."""
    nightly = Schedule(
        name=config.name,
        config="steadytrain.yaml",
        overrides={"output": MOUNT_PATH},
        cron="30 3 * * *",
        time_zone="UTC",
    )
    declared = ScheduleFile(name=config.name, schedules=[nightly])
    content = declared.model_dump(mode="json", exclude_unset=True)
    return (
        f"# Trains each night if the data have changed: steadytrain schedule apply {SCHEDULES}\n"
        "# Data on this machine do not exist on the cluster: name their address there, such as\n"
        '# data.source: ["s3://bucket/data.jsonl"], in overrides.\n'
        f"{yaml.safe_dump(content, sort_keys=False)}"
    )


def _steps(
    spec: Mapping[str, Any],
    dag: Mapping[str, Any],
    condition: str = "",
    before: Sequence[str] = (),
) -> Iterator[Component]:
    """Yield the steps of a graph and of the graphs in it, each after those that it waits for.

    Args:
        condition: of the graph. before: steps that the graph waits for.
    """
    waiting = dict(dag["dag"]["tasks"])
    groups: dict[str, list[str]] = {}
    while waiting:
        name = next(one for one, task in waiting.items() if not _before(task, waiting))
        task = waiting.pop(name)
        component = spec["components"][task["componentRef"]["name"]]
        members = (groups.get(one, [one]) for one in task.get("dependentTasks", ()))
        after = [*before, *(step for steps in members for step in steps)]
        if "dag" in component:
            when = task.get("triggerPolicy", {}).get("condition", "")
            inner = list(_steps(spec, component, _readable(when) or condition, after))
            groups[name] = [step.name for step in inner]
            yield from inner
            continue
        container = spec["deploymentSpec"]["executors"][component["executorLabel"]]["container"]
        size, inputs = container["resources"], component.get("inputDefinitions", {})
        yield Component(
            name=name,
            title=task["taskInfo"]["name"],
            image=container["image"],
            function=container["args"][-1],
            inputs=sorted(_names(inputs)),
            outputs=sorted(_names(component.get("outputDefinitions", {}))),
            depends_on=after,
            condition=condition,
            requests={"cpu": size["resourceCpuRequest"], "memory": size["resourceMemoryRequest"]},
            limits={"cpu": size["resourceCpuLimit"], "memory": size["resourceMemoryLimit"]},
        )


def _before(task: Mapping[str, Any], waiting: Mapping[str, Any]) -> bool:
    return any(one in waiting for one in task.get("dependentTasks", ()))


def _names(definitions: Mapping[str, Any]) -> Iterator[str]:
    for kind in ("parameters", "artifacts"):
        yield from definitions.get(kind, ())


def _readable(condition: str) -> str:
    """Return "evaluate is true" for KFP's condition on the output of a step."""
    step = condition.partition("pipelinechannel--")[2].partition("-Output")[0]
    return f"{step} returns true" if step else condition
