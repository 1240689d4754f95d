"""The steps register and promote as KFP components, and one that also evaluates before them."""

from kfp import dsl

from steadytrain.components.shared.environment import TRAIN_IMAGE


@dsl.component(base_image=TRAIN_IMAGE, install_kfp_package=False)
def register(
    resolved: dsl.Input[dsl.Artifact],
    decision: dsl.Input[dsl.Artifact],  # noqa: ARG001  only orders the steps
    version: dsl.Output[dsl.Artifact],
) -> None:
    """Register the candidate as a version, whatever the gate decided."""
    from steadytrain.components.register.step import kfp_register

    kfp_register(resolved=resolved, version=version)


@dsl.component(base_image=TRAIN_IMAGE, install_kfp_package=False)
def promote(
    resolved: dsl.Input[dsl.Artifact],
    version: dsl.Input[dsl.Artifact],  # noqa: ARG001  only orders the steps
    champion: dsl.Output[dsl.Artifact],
) -> None:
    """Give the candidate the champion's alias if it still beats the current champion."""
    from steadytrain.components.register.step import kfp_promote

    kfp_promote(resolved=resolved, champion=champion)


@dsl.component(base_image=TRAIN_IMAGE, install_kfp_package=False)
def evaluate_and_register(
    resolved: dsl.Input[dsl.Artifact],
    data: dsl.Input[dsl.Dataset],
    model: dsl.Input[dsl.Model],
    evaluation: dsl.Output[dsl.Artifact],
    decision: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
    classes: dsl.Output[dsl.ClassificationMetrics],
    page: dsl.Output[dsl.HTML],
    version: dsl.Output[dsl.Artifact],
) -> bool:
    """Evaluate the candidate, register it, and promote it if the gate allows it."""
    arguments = locals()
    from steadytrain.components.register.step import kfp_evaluate_and_register

    return kfp_evaluate_and_register(**arguments)
