"""The pipelines, as KFP compiles them: their steps, in order, and what each step's pod gets."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Any, Final

from kfp import dsl, kubernetes

from steadytrain.components.automl import component as searches
from steadytrain.components.detect_change.component import detect_change
from steadytrain.components.evaluate.component import evaluate
from steadytrain.components.preprocess.component import preprocess
from steadytrain.components.register.component import evaluate_and_register, promote, register
from steadytrain.components.report.component import report
from steadytrain.components.shared.config.operations import PipelineConfig, StepResources
from steadytrain.components.shared.config.parameters import PARAMETERS
from steadytrain.components.train.component import train
from steadytrain.components.tune import component as studies
from steadytrain.pipelines.pod_names import (
    API_ACCESS,
    METRICS_LABEL,
    MOUNT_PATH,
    NAME,
    SCRAPE_ANNOTATIONS,
    STEP_LABELS,
    STEP_SECRETS,
    SUPERVISING,
    Pipeline,
)

# How much of a node each step may use when the pipeline runs on a cluster.
#
# The request is what the smallest run needs, so that a pod fits on any node. The limit is what the
# largest common run may use before it gets in the way of other pods.
#
# No task uses KFP's retries. KFP cannot tell a lost pod from a user's mistake, and would repeat
# both. Which of the two it sees at all depends on the version of Argo. The step itself repeats
# what is worth repeating (the supervisor's policy, the time-outs of storage and tracking), or you
# run the pipeline again, which continues from the completed work.


@dataclass(frozen=True, slots=True)
class Size:
    """CPU in cores and memory, in Kubernetes notation."""

    cpu_request: str
    memory_request: str
    cpu_limit: str
    memory_limit: str


LIGHT: Final = Size("250m", "512Mi", "2", "4Gi")
SUPERVISOR: Final = Size("100m", "512Mi", "16", "64Gi")
"""A supervisor of training pods uses 260 MB and 0.02 cores (measured), and KFP's executor around it
imports some more. Where training runs in the step's own pod, `pipeline.resources` reserves more."""
SIZES: Final[Mapping[str, Size]] = {
    "preprocess": Size("500m", "1Gi", "8", "16Gi"),
    "train": SUPERVISOR,
    "tune": Size("1", "2Gi", "16", "64Gi"),
    "search": Size("1", "2Gi", "16", "64Gi"),
    "train-winner": Size("250m", "1Gi", "16", "64Gi"),
    "cross-validate": Size("1", "2Gi", "16", "64Gi"),
    "evaluate-and-register": Size("1", "2Gi", "8", "32Gi"),
    "evaluate": Size("1", "2Gi", "8", "32Gi"),
    "register": Size("500m", "1Gi", "4", "16Gi"),
    "promote": Size("500m", "1Gi", "4", "32Gi"),
}
"""Sizes by step; a step that is not listed is LIGHT. A promotion may evaluate again, and loads a
model."""


@dataclass(frozen=True)
class Pods:
    """What the pods of a pipeline's steps get on a cluster. kfp.local ignores all of it.

    volume: name of the claim, or the pipeline parameter that holds it.
    shape: how the pipeline is split into pods, and what they reserve.
    """

    volume: str
    shape: PipelineConfig

    def step(self, task: dsl.PipelineTask, title: str) -> dsl.PipelineTask:
        """Give a task what every step has: limits, the volume, a title, and no KFP cache."""
        # KFP's cache decides before our code runs, and knows neither the data nor its age. Steps
        # decide about reuse themselves (components/shared/stage.py).
        attach(limit(task, self.shape), self.volume)
        return task.set_display_name(title).set_caching_options(False)


def attach(task: dsl.PipelineTask, volume: str) -> dsl.PipelineTask:
    """Give a task the volume, its keys of the Secret, and labels.

    Steps that train also get shared memory for ranks, and an annotation that protects their pods
    from the autoscaler.

    Args:
        volume: name of the claim, or the pipeline parameter that holds it.
    """
    kubernetes.mount_pvc(task, pvc_name=volume, mount_path=MOUNT_PATH)
    keys = {key: key for key in STEP_SECRETS.get(task.name, ())}
    if keys:
        kubernetes.use_secret_as_env(task, NAME, keys, optional=True)
    for label, value in STEP_LABELS.items():
        kubernetes.add_pod_label(task, label, value)
    if task.name == "report":
        # Resubmits a run that lost a step.
        kubernetes.add_pod_label(task, *API_ACCESS)
    if task.name in SUPERVISING:
        # It serves the run's metrics, if a port is configured.
        kubernetes.add_pod_label(task, *METRICS_LABEL)
        for name, value in SCRAPE_ANNOTATIONS.items():
            kubernetes.add_pod_annotation(task, name, value)
        # The default on a node is 64 MiB, which is too little for torch.
        kubernetes.empty_dir_mount(task, "shared-memory", "/dev/shm", medium="Memory")
        # It supervises for the entire training run, so the autoscaler must not evict it.
        kubernetes.add_pod_annotation(
            task, "cluster-autoscaler.kubernetes.io/safe-to-evict", "false"
        )
    return task


def limit(task: dsl.PipelineTask, shape: PipelineConfig) -> dsl.PipelineTask:
    """Set a task's requests and limits to those of its step."""
    size = SIZES.get(task.name, LIGHT)
    resources = shape.resources.get(task.name, StepResources())
    cpu, memory = resources.cpu or size.cpu_request, resources.memory or size.memory_request
    task.set_cpu_request(cpu).set_cpu_limit(_larger(cpu, size.cpu_limit))
    return task.set_memory_request(memory).set_memory_limit(_larger(memory, size.memory_limit))


def _larger(first: str, second: str) -> str:
    from kubernetes.utils import parse_quantity

    return first if parse_quantity(first) > parse_quantity(second) else second


def finetune(parameters: Mapping[str, Any], pods: Pods) -> None:
    """Train, evaluate, and register one model."""
    closing = pods.step(report(**parameters), "Report")
    with dsl.ExitHandler(closing, name="Train, evaluate, register"):
        _train_and_evaluate(parameters, pods)


def retrain(parameters: Mapping[str, Any], pods: Pods) -> None:
    """Train, evaluate, and register one model if there is new data."""
    closing = pods.step(report(**parameters), "Report")
    with dsl.ExitHandler(closing, name="Check, and retrain"):
        news = pods.step(detect_change(**parameters), "Look for new data")
        with dsl.If(news.outputs["Output"] == True, name="New data"):  # noqa: E712  KFP's syntax
            _train_and_evaluate(parameters, pods)


def tune(parameters: Mapping[str, Any], pods: Pods) -> None:
    """Run or continue a study, and train, evaluate and register its winner."""
    closing = pods.step(studies.report(**parameters), "Report")
    with dsl.ExitHandler(closing, name="Tune, train the winner, register"):
        prepared = pods.step(preprocess(**parameters), "Preprocess")
        resolved, data = prepared.outputs["resolved"], prepared.outputs["data"]
        tuned = pods.step(studies.tune(resolved=resolved, data=data), "Tune")
        with dsl.If(tuned.outputs["Output"] == True, name="Winner"):  # noqa: E712  KFP's syntax
            trained = studies.train_winner(
                resolved=resolved, best=tuned.outputs["best"], summary=tuned.outputs["summary"]
            )
            pods.step(trained, "Train the winner")
            _evaluate(
                trained.outputs["winner"], trained.outputs["data"], trained.outputs["model"], pods
            )


def cross_validate(parameters: Mapping[str, Any], pods: Pods) -> None:
    """Run or continue a cross-validation."""
    closing = pods.step(studies.report(**parameters), "Report")
    with dsl.ExitHandler(closing, name="Cross-validate"):
        pods.step(studies.cross_validate(**parameters), "Cross-validate")


def automl(parameters: Mapping[str, Any], pods: Pods) -> None:
    """Search for the best model of some data, and train, evaluate and register it."""
    closing = pods.step(searches.report(**parameters), "Report")
    with dsl.ExitHandler(closing, name="Search, refit, register"):
        prepared = pods.step(preprocess(**parameters), "Preprocess")
        search = pods.step(searches.search(resolved=prepared.outputs["resolved"]), "Search")
        trained = studies.train_winner(
            resolved=search.outputs["study"],
            best=search.outputs["best"],
            summary=search.outputs["board"],
        )
        pods.step(trained, "Refit")
        _evaluate(
            trained.outputs["winner"], trained.outputs["data"], trained.outputs["model"], pods
        )


def _train_and_evaluate(parameters: Mapping[str, Any], pods: Pods) -> None:
    """Add the steps from the data to the champion to the pipeline that is being built."""
    prepared = pods.step(preprocess(**parameters), "Preprocess")
    resolved, data = prepared.outputs["resolved"], prepared.outputs["data"]
    trained = pods.step(train(resolved=resolved, data=data), "Train")
    _evaluate(resolved, data, trained.outputs["model"], pods)


def _evaluate(resolved: Any, data: Any, model: Any, pods: Pods) -> None:
    """Add the steps from a trained model to the champion to the pipeline that is being built."""
    if pods.shape.fuse:
        done = evaluate_and_register(resolved=resolved, data=data, model=model)
        pods.step(done, "Evaluate, gate, register")
        return
    evaluated = pods.step(evaluate(resolved=resolved, data=data, model=model), "Evaluate and gate")
    registered = pods.step(
        register(resolved=resolved, decision=evaluated.outputs["decision"]), "Register"
    )
    with dsl.If(evaluated.outputs["Output"] == True, name="Promoted"):  # noqa: E712  KFP's syntax
        pods.step(promote(resolved=resolved, version=registered.outputs["version"]), "Promote")


Build = Callable[[Mapping[str, Any], Pods], None]
"""Adds a pipeline's steps. Takes the parameters of the steps that resolve the configuration."""


@dataclass(frozen=True)
class Dag:
    """A pipeline: the function that adds its steps, and what the KFP UI shows about it."""

    build: Build
    display_name: str
    description: str


DAGS: Final[dict[Pipeline, Dag]] = {
    "finetune": Dag(
        finetune,
        display_name="Train, evaluate, register",
        description="Train or fine-tune a model in a run that recovers from failures, compare the "
        "model with the champion, and register it in MLflow. Parameters that you leave empty use "
        "the value in the configuration.",
    ),
    "retrain": Dag(
        retrain,
        display_name="Retrain when there is new data",
        description="Check whether the data differ from those of the champion and the newest "
        "candidate, and how far they have drifted. If there is new data, train, evaluate and "
        'register a model. If not, end with "nothing new". Parameters that you leave empty use '
        "the value in the configuration.",
    ),
    "tune": Dag(
        tune,
        display_name="Tune, train the winner, register",
        description="Search for better settings within a budget, train the best configuration on "
        "fresh seeds, compare the best model with the champion, and register it in MLflow. The "
        "study continues if it has begun. Parameters that you leave empty use the value in the "
        "configuration.",
    ),
    "cross-validate": Dag(
        cross_validate,
        display_name="Cross-validate",
        description="Divide the training side into folds, and train on all folds but one, for each "
        "of them. Each model is scored on the fold that it never saw. Nothing is registered. The "
        "study continues if it has begun. Parameters that you leave empty use the value in the "
        "configuration.",
    ),
    "automl": Dag(
        automl,
        display_name="Search, refit, register",
        description="Search for the best model of some data, or ensemble of models, on folds of "
        "the training side. Train it on everything but the test side, compare it with the "
        "champion, and register it in MLflow. The search continues if it has begun. Parameters "
        "that you leave empty use the value in the configuration.",
    ),
}


def pipeline_component(pipeline: Pipeline, shape: PipelineConfig) -> Any:
    """Return a pipeline in the form that KFP's compiler takes."""
    dag = DAGS[pipeline]
    decorate = dsl.pipeline(
        name=f"steadytrain-{pipeline}",
        display_name=dag.display_name,
        description=dag.description,
    )
    return decorate(_with_parameters(dag.build, shape))


_SIGNATURE = Signature(
    [
        Parameter(
            item.name,
            Parameter.POSITIONAL_OR_KEYWORD,
            default=item.default,
            annotation=type(item.default),
        )
        for item in PARAMETERS
    ],
    return_annotation=None,
)


def _with_parameters(build: Build, shape: PipelineConfig) -> Callable[..., None]:
    """Return a function with a signature and a docstring that describe PARAMETERS.

    KFP reads both with `inspect`. A component's parameters cannot be written this way: KFP sends
    the source of its function to the pod, and reads the annotations there.
    """

    @functools.wraps(build)
    def pipeline(*values: Any, **named: Any) -> None:
        bound = _SIGNATURE.bind(*values, **named)
        bound.apply_defaults()
        parameters = {**bound.arguments, "job": dsl.PIPELINE_JOB_ID_PLACEHOLDER}
        build(parameters, Pods(parameters.pop("volume"), shape))

    described = "\n".join(f"    {item.name}: {item.description}" for item in PARAMETERS)
    pipeline.__doc__ = f"{inspect.getdoc(build)}\n\nArgs:\n{described}"
    vars(pipeline)["__signature__"] = _SIGNATURE
    return pipeline
