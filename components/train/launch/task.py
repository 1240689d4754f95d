"""Applies settings of the train step's pipeline task to the training pods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steadytrain.components.shared.config import RunConfig

if TYPE_CHECKING:
    from kfp import dsl


def with_task(config: RunConfig, task: dsl.TaskConfig | None) -> RunConfig:
    """Return the configuration with what the pipeline's author set on the task.

    That is where pods may run, and their accelerators. The task's cores and memory are those of the
    step itself. Volumes and variables come from the step's pod (`own_pod.py`), which has them too.
    The task does not override values that the configuration sets.

    Args:
        task: filled in by KFP; None in a local run.
    """
    if task is None:
        return config
    pods = config.compute.pods
    given: dict[str, Any] = {
        "node_selector": task.node_selector,
        "tolerations": task.tolerations,
        "affinity": task.affinity,
    }
    update = {name: value for name, value in given.items() if value and not getattr(pods, name)}
    if pods.gpus is None:
        update |= _accelerators(task.resources or {})
    compute = config.compute.model_copy(update={"pods": pods.model_copy(update=update)})
    return config.model_copy(update={"compute": compute})


def _accelerators(resources: dict[str, Any]) -> dict[str, Any]:
    """Return number and resource name. Unlike `cpu`, an extended resource's name has a domain."""
    limits = resources.get("limits") or {}
    found = next((name for name in limits if "/" in name), None)
    return {"gpu_resource": found, "gpus": int(limits[found])} if found else {}
