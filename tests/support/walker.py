"""Runs a compiled pipeline's executors as pods, one by one, like KFP's driver and launcher.

A task's image, command, arguments, limits, volumes and variables come from the compiled file. The
executor's input is JSON in its arguments. Artifacts are files below /minio, where KFP's launcher
puts them. The executor reports its outputs in a file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from steadytrain.pipelines.pod_names import NAME

from support.cluster import Cluster, PodFailed

STORE = "mlpipeline/v2/artifacts"
_CONDITION = re.compile(r"inputs\.parameter_values\['(?P<name>[^']+)'\]\s*==\s*(?P<value>.+)")
_LIMITS = {
    "limits": {"cpu": "resourceCpuLimit", "memory": "resourceMemoryLimit"},
    "requests": {"cpu": "resourceCpuRequest", "memory": "resourceMemoryRequest"},
}


@dataclass
class Values:
    """The inputs or outputs of a task."""

    parameters: dict[str, Any] = field(default_factory=dict)
    artifacts: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass
class Walker:
    """One run of a compiled pipeline.

    job: KFP's id of the run.
    last: the task after which it skips all others. Empty means none.
    states: the state of each task that was reached: "done", "failed" or "skipped".
    logs: the pod log of each task.
    """

    cluster: Cluster
    spec: Mapping[str, Any]
    platform: Mapping[str, Any]
    job: str
    last: str = ""
    states: dict[str, str] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)

    def run(self, **parameters: Any) -> None:
        """Run the pipeline; exit handlers always run.

        Raises:
            PodFailed: the first task that failed.
        """
        root = self.spec["root"]
        self.cluster.shell("mkdir", "-p", f"/mnt/{NAME}/kfp")
        defaults = {
            name: item["defaultValue"]
            for name, item in root["inputDefinitions"]["parameters"].items()
        }
        self._dag(root["dag"], Values(defaults | parameters))

    def _dag(self, dag: Mapping[str, Any], given: Values) -> None:
        done: dict[str, Values] = {}
        closing = [name for name, task in dag["tasks"].items() if _closes(task)]
        try:
            for name in _ordered(dag["tasks"]):
                if name not in closing:
                    done[name] = self._task(name, dag["tasks"][name], given, done)
        finally:
            for name in closing:
                self._task(name, dag["tasks"][name], given, done)

    def _task(
        self, name: str, task: Mapping[str, Any], given: Values, done: Mapping[str, Values]
    ) -> Values:
        if self.states.get(self.last) == "done":
            self.states[name] = "skipped"
            return Values()
        inputs = self._inputs(task, given, done)
        condition = task.get("triggerPolicy", {}).get("condition")
        if condition and not _holds(condition, inputs.parameters):
            self.states[name] = "skipped"
            return Values()
        component = self.spec["components"][task["componentRef"]["name"]]
        self.states[name] = "failed"
        if "dag" in component:
            self._dag(component["dag"], inputs)
            outputs = Values()
        else:
            outputs = self._execute(name, component, inputs, given)
        self.states[name] = "done"
        return outputs

    def _inputs(self, task: Mapping[str, Any], given: Values, done: Mapping[str, Values]) -> Values:
        stated, found = task.get("inputs", {}), Values()
        for name, source in stated.get("parameters", {}).items():
            found.parameters[name] = self._parameter(source, given, done)
        for name, source in stated.get("artifacts", {}).items():
            if "componentInputArtifact" in source:
                found.artifacts[name] = given.artifacts[source["componentInputArtifact"]]
            else:
                output = source["taskOutputArtifact"]
                made = done[output["producerTask"]].artifacts
                found.artifacts[name] = made[output["outputArtifactKey"]]
        return found

    def _parameter(
        self, source: Mapping[str, Any], given: Values, done: Mapping[str, Values]
    ) -> Any:
        if "componentInputParameter" in source:
            return given.parameters[source["componentInputParameter"]]
        if "taskOutputParameter" in source:
            output = source["taskOutputParameter"]
            return done[output["producerTask"]].parameters[output["outputParameterKey"]]
        constant = source["runtimeValue"]["constant"]
        return self.job if constant == "{{$.pipeline_job_uuid}}" else constant

    def _execute(
        self, name: str, component: Mapping[str, Any], inputs: Values, given: Values
    ) -> Values:
        label = component["executorLabel"]
        container = self.spec["deploymentSpec"]["executors"][label]["container"]
        place = f"{STORE}/{self.job}/{name}"
        executor_input = json.dumps(_executor_input(component, inputs, place))
        volumes, mounts, variables = self._attached(label, given)
        pod = f"{name}-{self.job[:8]}"
        try:
            self.logs[name] = self.cluster.run(
                pod,
                {
                    "image": container["image"],
                    "command": container["command"],
                    "args": [text.replace("{{$}}", executor_input) for text in container["args"]],
                    "env": variables,
                    "resources": _resources(container["resources"]),
                },
                volumes=volumes,
                mounts=mounts,
            )
        except PodFailed as error:
            self.logs[name] = str(error)
            raise
        told = json.loads(self.cluster.read(f"/mnt/{NAME}/kfp/{place}/output_metadata.json"))
        artifacts = {key: item["artifacts"][0] for key, item in told.get("artifacts", {}).items()}
        return Values(told.get("parameterValues", {}), artifacts)

    def _attached(
        self, label: str, given: Values
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
        """Return volumes, mounts and variables from the second document of the compiled file."""
        executors = self.platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
        # KFP's own store, which normally only its launcher sees, is a folder on the same volume.
        claims = [(NAME, "/minio", "kfp")]
        for item in executors[label].get("pvcMount", ()):
            name = self._parameter(item["pvcNameParameter"], given, {})
            claims.append((name, item["mountPath"], item.get("subPath", "")))
        # List each claim once: a pod with the same claim in two volumes never starts.
        names = {claim for claim, *_ in claims}
        volumes: list[dict[str, Any]] = [
            {"name": name, "persistentVolumeClaim": {"claimName": name}} for name in sorted(names)
        ]
        mounts = [{"name": name, "mountPath": path, "subPath": part} for name, path, part in claims]
        for item in executors[label].get("emptyDirMounts", ()):
            volumes.append({"name": item["volumeName"], "emptyDir": {"medium": item["medium"]}})
            mounts.append({"name": item["volumeName"], "mountPath": item["mountPath"]})
        return volumes, mounts, list(_variables(executors[label]))


def _closes(task: Mapping[str, Any]) -> bool:
    strategy = task.get("triggerPolicy", {}).get("strategy")
    return bool(strategy == "ALL_UPSTREAM_TASKS_COMPLETED")


def _ordered(tasks: Mapping[str, Any]) -> Iterator[str]:
    left = dict(tasks)
    while left:
        ready = [
            name
            for name, task in left.items()
            if left.keys().isdisjoint(task.get("dependentTasks", ()))
        ]
        assert ready, f"these tasks wait for each other: {', '.join(left)}"
        yield from ready
        for name in ready:
            del left[name]


def _holds(condition: str, parameters: Mapping[str, Any]) -> bool:
    match = _CONDITION.fullmatch(condition)
    assert match, f"the walker does not support this condition: {condition}"
    return bool(parameters[match["name"]] == json.loads(match["value"]))


def _executor_input(component: Mapping[str, Any], inputs: Values, place: str) -> dict[str, Any]:
    outputs = component.get("outputDefinitions", {})
    artifacts = {
        name: [{"name": name, "type": item["artifactType"], "uri": f"minio://{place}/{name}"}]
        for name, item in outputs.get("artifacts", {}).items()
    }
    return {
        "inputs": {
            "parameterValues": inputs.parameters,
            "artifacts": {name: {"artifacts": [item]} for name, item in inputs.artifacts.items()},
        },
        "outputs": {
            "parameters": {
                name: {"outputFile": f"/minio/{place}/{name}"}
                for name in outputs.get("parameters", {})
            },
            "artifacts": {name: {"artifacts": items} for name, items in artifacts.items()},
            "outputFile": f"/minio/{place}/output_metadata.json",
        },
    }


def _resources(stated: Mapping[str, str]) -> dict[str, dict[str, str]]:
    return {
        kind: {what: stated[key] for what, key in names.items() if key in stated}
        for kind, names in _LIMITS.items()
    }


def _variables(executor: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for secret in executor.get("secretAsEnv", ()):
        for item in secret["keyToEnv"]:
            reference = {
                "name": secret["secretName"],
                "key": item["secretKey"],
                "optional": secret.get("optional", False),
            }
            yield {"name": item["envVar"], "valueFrom": {"secretKeyRef": reference}}
