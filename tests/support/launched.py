"""The train step in a pod of its own on a real cluster, and the jobs that it starts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import yaml
from kubernetes import client

from steadytrain.components.shared.events import Event
from steadytrain.components.shared.events.stream import COPY, from_json
from steadytrain.components.shared.events.types import AttemptEnded, AttemptStarted, TrainingStep
from steadytrain.components.train.launch.evidence import node_of
from steadytrain.components.train.launch.naming import ATTEMPT, RUN
from steadytrain.pipelines.cluster.doctor import RIGHTS, Right
from steadytrain.pipelines.pod_names import MOUNT_PATH, NAME

from support.cluster import Cluster, PodFailed, volume, volume_mount

E = TypeVar("E", bound=Event)
STEPS = 80
OUTPUT = f"{MOUNT_PATH}/launched"
CODE = f"{MOUNT_PATH}/code"
KINDS = {
    "trainjobs": ("trainer.kubeflow.org", "v1alpha1"),
    "trainingruntimes": ("trainer.kubeflow.org", "v1alpha1"),
    "jobsets": ("jobset.x-k8s.io", "v1alpha2"),
    "jobs": ("batch", "v1"),
}
"""The kinds that make up a TrainJob, except pods."""
CONFIG: dict[str, Any] = {
    "name": "tiny",
    "output": OUTPUT,
    "data": {
        "source": ["package:stdlib/json", "package:stdlib/xml"],
        "format": "source",
        "sequence_length": 64,
        "validation_share": 0.1,
        "test_share": 0.1,
    },
    "model": {
        "vocab_size": 300,
        "config": {
            "model_type": "llama",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "vocab_size": 32_000,
        },
    },
    "training": {
        "global_batch_size": 8,
        "max_steps": STEPS,
        "logging_steps": 1,
        "save_steps": 5,
        "eval_steps": STEPS,
    },
    "compute": {
        "device": "cpu",
        "nodes": 2,
        "pods": {
            "cpu": "100m",
            "memory": "2Gi",
            "shared_memory": "64Mi",
            "pending_timeout_seconds": 60,
        },
    },
    "recovery": {
        "reuse_ttl_seconds": 0,
        "backoff_seconds": 1,
        "lease_seconds": 20,
        "stop_grace_seconds": 10,
    },
}
TABLE = f"{OUTPUT}/table.csv"
UNITS = 8
SEARCH: dict[str, Any] = {
    "name": "wine",
    "output": OUTPUT,
    "data": {
        "source": [TABLE],
        "target": "target",
        "task": "tabular_classification",
        "validation_share": 0.1,
        "test_share": 0.2,
    },
    "model": {"framework": "lightgbm", "config": {"model_type": "lightgbm"}},
    "automl": {
        "quality": "fast",
        "budget": {"units": UNITS, "parallel": 2},
        "constraints": {"frameworks": ["sklearn"]},
    },
    "compute": {**CONFIG["compute"], "nodes": 1},
    "recovery": CONFIG["recovery"],
}
"""A search of the table, whose units are jobs. It tries two configurations."""


@dataclass(frozen=True)
class Launched:
    """Runs of the train step in one namespace, which share data that are prepared once.

    rights: the launcher's rights on the API server, and no others.
    kinds: the kinds, besides pods, that the controller creates for a job.
    config: of every run, without its name.
    """

    cluster: Cluster
    image: str
    rights: Sequence[Right] = RIGHTS
    kinds: Mapping[str, tuple[str, str]] = field(default_factory=lambda: KINDS)
    config: Mapping[str, Any] = field(default_factory=lambda: CONFIG)

    def prepare(self) -> None:
        """Set up the service account's rights, the code of the faults, and the data."""
        self._allow()
        for name in ("faults.py", "limits.py"):
            self.write(f"{CODE}/support/{name}", Path(__file__).with_name(name).read_text())
        self.cluster.run("prepare", self._step("preprocess", "prepared"), **self._pod())

    def start(
        self,
        run: str,
        *,
        pod: str = "",
        step: str = "train",
        faults: str = "",
        env: Mapping[str, str] = MappingProxyType({}),
        **changes: Any,
    ) -> str:
        """Start a step of a run, the train step by default; return the name of its pod."""
        records = f"{OUTPUT}/runs/{run}/records"
        prepared = f"{OUTPUT}/runs/prepared/records/preprocess.json"
        self.cluster.shell("sh", "-c", f"mkdir -p {records} && cp {prepared} {records}/")
        name = pod or run
        container = self._step(step, run, faults=faults, **changes)
        container["env"] += [{"name": key, "value": value} for key, value in env.items()]
        self.cluster.start(name, container, **self._pod())
        return name

    def report(self, run: str, **changes: Any) -> str:
        """Run the report step of a run, as the exit handler does; return its log."""
        step = self._step("report", run, **changes)
        return self.cluster.run(f"{run}-report", step, **self._pod())

    def end(self, pod: str, seconds: float = 600) -> tuple[str, str]:
        """Wait until a pod has ended, and delete it; return its phase and its log."""
        phase = self.cluster.wait(pod, ("Succeeded", "Failed"), seconds)
        log = self.log(pod)
        self.kill(pod)
        return phase, log

    def log(self, pod: str) -> str:
        core = self.cluster.core
        return str(core.read_namespaced_pod_log(pod, self.cluster.namespace))

    def kill(self, pod: str) -> None:
        """Delete the pod without a grace period."""
        core = self.cluster.core
        core.delete_namespaced_pod(pod, self.cluster.namespace, grace_period_seconds=0)

    def record(self, run: str) -> dict[str, Any]:
        """Return the train step's record."""
        found: dict[str, Any] = json.loads(self.read(f"{run}/records/train.json"))
        return found

    def events(self, run: str, kind: type[E]) -> list[E]:
        """Return a run's events of this kind so far, in order of time."""
        return self._told(f"{run}/events/*.jsonl", kind)

    def ended(self, run: str) -> list[AttemptEnded]:
        """Return the ended attempts."""
        return self.events(run, AttemptEnded)

    def losses(self, run: str) -> dict[int, float]:
        return {event.step: event.loss for event in self.events(run, TrainingStep)}

    def classes(self, run: str) -> list[str]:
        """Return the failure class of each attempt in order; "" for a successful one."""
        return [event.failure_class for event in self.ended(run)]

    def micro_batches(self, run: str) -> list[int]:
        return [event.batch.micro_batch_size for event in self.events(run, AttemptStarted)]

    def until(self, run: str, kind: type[E], met: Callable[[E], bool], seconds: float = 600) -> E:
        """Wait for the first event of a kind that meets a condition, and return it."""
        deadline = time.monotonic() + seconds
        while True:
            found = next(filter(met, self.events(run, kind)), None)
            if found is not None:
                return found
            if time.monotonic() > deadline:
                raise PodFailed(f"run {run}: no {kind.__name__} within {seconds:.0f} s")
            time.sleep(1)

    def pods(self, run: str, attempt: int) -> dict[int, Any]:
        """Return an attempt's pods by node."""
        found = self.cluster.core.list_namespaced_pod(
            self.cluster.namespace, label_selector=f"{RUN}={run},{ATTEMPT}={attempt}"
        )
        return {node_of({"metadata": pod.metadata.to_dict()}): pod for pod in found.items}

    def left(self, run: str, seconds: float = 30) -> list[str]:
        """Return the run's objects that remain after waiting for the garbage collector."""
        deadline = time.monotonic() + seconds
        while (names := self._of(run)) and time.monotonic() < deadline:
            time.sleep(1)
        return names

    def _of(self, run: str) -> list[str]:
        api, names = client.CustomObjectsApi(), []
        for plural, (group, version) in self.kinds.items():
            found = api.list_namespaced_custom_object(
                group, version, self.cluster.namespace, plural
            )
            names += [f"{plural}/{item['metadata']['name']}" for item in found["items"]]
        pods = self.cluster.core.list_namespaced_pod(self.cluster.namespace).items
        names += [f"pods/{pod.metadata.name}" for pod in pods]
        return [name for name in names if f"/{run}-a" in name]

    def _step(self, step: str, run: str, *, faults: str = "", **changes: Any) -> dict[str, Any]:
        config = {**self.config, "run": run}
        for section, fields in changes.items():
            config[section] = _merged(config.get(section, {}), fields)
        return {
            "image": self.image,
            "command": ["steadytrain"],
            "args": ["step", step, yaml.safe_dump(config)],
            "env": [
                _own("KFP_POD_NAME", "metadata.name"),
                {"name": "PYTHONPATH", "value": CODE},
                {"name": "FAULTS", "value": faults},
                {"name": "OMP_NUM_THREADS", "value": "1"},
            ],
            "resources": {"requests": {"cpu": "50m", "memory": "256Mi"}},
        }

    def _pod(self) -> dict[str, Sequence[Mapping[str, Any]]]:
        return {"volumes": [volume()], "mounts": [volume_mount()]}

    def read(self, pattern: str) -> str:
        """Return the content of files of the runs, concatenated."""
        # The client would parse pure JSON into an object and return its repr.
        files = f'{OUTPUT}/runs/{pattern}; do cat "$file"; echo; done'
        told = self.cluster.shell("sh", "-c", f"echo told:; for file in {files} || true")
        return told.removeprefix("told:\n")

    def _told(self, pattern: str, kind: type[E]) -> list[E]:
        """Return the events of a kind, skipping a line that is still being written."""
        lines = [line for line in self.read(pattern).splitlines() if line.startswith("{")]
        told = [from_json(line) for line in lines if line.endswith("}") and COPY not in line]
        return sorted(
            (event for event in told if isinstance(event, kind)), key=lambda event: event.time
        )

    def write(self, path: str, content: str) -> None:
        script = "import pathlib, sys; path = pathlib.Path(sys.argv[1]); "
        script += "path.parent.mkdir(parents=True, exist_ok=True); path.write_text(sys.argv[2])"
        self.cluster.shell("python", "-c", script, path, content)

    def _allow(self) -> None:
        api, namespace = client.RbacAuthorizationV1Api(), self.cluster.namespace
        rules = [
            {"apiGroups": [right.group], "resources": [right.resource], "verbs": [*right.verbs]}
            for right in self.rights
        ]
        role = {"metadata": {"name": "launcher"}, "rules": rules}
        binding = {
            "metadata": {"name": "launcher"},
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "Role",
                "name": "launcher",
            },
            "subjects": [{"kind": "ServiceAccount", "name": NAME, "namespace": namespace}],
        }
        for create, body in (
            (api.create_namespaced_role, role),
            (api.create_namespaced_role_binding, binding),
        ):
            create(namespace, body)


def _merged(section: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Merge fields into a section, including one level of nested sections."""
    merged = dict(section)
    for name, value in fields.items():
        inner = merged.get(name)
        merged[name] = {**inner, **value} if isinstance(inner, dict) else value
    return merged


def _own(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
