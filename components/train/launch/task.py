"""What the task of the train step carries in a pipeline, for the pods that train."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steadytrain.components.shared.config import RunConfig

if TYPE_CHECKING:
    from kfp import dsl


def with_task(config: RunConfig, task: dsl.TaskConfig | None) -> RunConfig:
    """The configuration with what the pipeline's author has set on the task.

    That is where pods may run, and their accelerators. Cores and memory of the task are those
    of the step itself; volumes and variables are taken from its pod (`own_pod.py`), which has
    them too. What the configuration says already stays as it is.

    Args:
        task: None outside of a server, which does not tell.
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
    """Their number and name; an extended resource, unlike those of every node, has a domain."""
    limits = resources.get("limits") or {}
    found = next((name for name in limits if "/" in name), None)
    return {"gpu_resource": found, "gpus": int(limits[found])} if found else {}
