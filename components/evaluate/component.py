"""The evaluate step, including the gate, as a KFP component."""

from kfp import dsl

from steadytrain.components.shared.environment import TRAIN_IMAGE


@dsl.component(base_image=TRAIN_IMAGE, install_kfp_package=False)
def evaluate(
    resolved: dsl.Input[dsl.Artifact],
    data: dsl.Input[dsl.Dataset],
    model: dsl.Input[dsl.Model],
    evaluation: dsl.Output[dsl.Artifact],
    decision: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
    classes: dsl.Output[dsl.ClassificationMetrics],
    page: dsl.Output[dsl.HTML],
) -> bool:
    """Evaluate the candidate on the test side, and decide whether it beats the champion."""
    arguments = locals()
    from steadytrain.components.evaluate.step import kfp_evaluate

    return kfp_evaluate(**arguments)
