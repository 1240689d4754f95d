"""The train step as KFP sees it."""

from kfp import dsl

from steadytrain.components.shared.environment import TRAIN_IMAGE

_FIELD = dsl.TaskConfigField
# Placement applies to the pods that train. The supervisor's own pod stays on stable nodes.
_OF_THE_PODS = (
    _FIELD.KUBERNETES_AFFINITY,
    _FIELD.KUBERNETES_NODE_SELECTOR,
    _FIELD.KUBERNETES_TOLERATIONS,
)
_OF_BOTH = (_FIELD.RESOURCES, _FIELD.ENV, _FIELD.KUBERNETES_VOLUMES)
PASSED_ON = [
    *_OF_THE_PODS,
    *(dsl.TaskConfigPassthrough(field=field, apply_to_task=True) for field in _OF_BOTH),
]
"""What the author of a pipeline sets on the task of a step that trains in pods."""


@dsl.component(
    base_image=TRAIN_IMAGE,
    install_kfp_package=False,
    task_config_passthroughs=PASSED_ON,
)
def train(
    resolved: dsl.Input[dsl.Artifact],
    data: dsl.Input[dsl.Dataset],
    model: dsl.Output[dsl.Model],
    result: dsl.Output[dsl.Metrics],
    task: dsl.TaskConfig = None,  # KFP fills this in only if the default is None
) -> None:
    """Train the model. Resume from the newest checkpoint if there is one."""
    arguments = locals()
    from steadytrain.components.train.step import kfp_train

    kfp_train(**arguments)
