"""What a pipeline's author sets on the train step's task reaches the training pods."""

from __future__ import annotations

from kfp import dsl

from steadytrain.components.train.component import train
from steadytrain.components.train.launch.own_pod import with_task

SPOT = {"key": "spot", "operator": "Exists"}
AFFINITY = {"nodeAffinity": {}}


def task(**fields):
    """Return a task config as the server's driver passes it: unset fields are null or empty."""
    empty = dict.fromkeys(("affinity", "tolerations", "node_selector", "env"))
    return dsl.TaskConfig(**{**empty, "resources": {}, **fields})


def test_node_selectors_and_accelerators_are_adopted(config):
    limits = {"cpu": "16", "memory": "64Gi", "amd.com/gpu": "4"}
    given = task(
        node_selector={"zone": "a"},
        tolerations=[SPOT],
        affinity=AFFINITY,
        resources={"limits": limits},
    )
    before = config()
    pods = with_task(before, given).compute.pods
    assert (pods.node_selector, pods.tolerations) == ({"zone": "a"}, [SPOT])
    assert pods.affinity == AFFINITY
    assert (pods.gpu_resource, pods.gpus) == ("amd.com/gpu", 4)
    of_the_step_itself = before.compute.pods
    assert (pods.cpu, pods.memory) == (of_the_step_itself.cpu, of_the_step_itself.memory)


def test_configured_fields_stay(config):
    own = {"node_selector": {"zone": "b"}, "gpus": 8, "tolerations": [{"key": "mine"}]}
    before = config(pods=own)
    given = task(
        node_selector={"zone": "a"},
        tolerations=[SPOT],
        resources={"limits": {"amd.com/gpu": "4"}},
    )
    assert with_task(before, given) == before


def test_task_without_settings_changes_nothing(config):
    before = config()
    assert with_task(before, task()) == before
    assert with_task(before, None) == before


def test_placement_is_not_taken_from_the_steps_pod():
    spec = train.component_spec.task_config_passthroughs
    passed = {item.field.name: item.apply_to_task for item in spec}
    assert not passed["KUBERNETES_TOLERATIONS"]
    assert not passed["KUBERNETES_NODE_SELECTOR"]
    assert not passed["KUBERNETES_AFFINITY"]
    assert passed["KUBERNETES_VOLUMES"]
    assert passed["ENV"]
    assert passed["RESOURCES"]
