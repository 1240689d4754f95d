"""What follows the training, in one step, as KFP sees it."""

from kfp import dsl

from steadytrain.components.shared.image import TRAIN_IMAGE


@dsl.component(base_image=TRAIN_IMAGE, install_kfp_package=False)
def judge(
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
    """Judges the candidate, registers it, and promotes it where the gate lets it."""
    from steadytrain.components.judge import artifacts

    return artifacts.judge(
        resolved=resolved,
        data=data,
        model=model,
        evaluation=evaluation,
        decision=decision,
        metrics=metrics,
        classes=classes,
        page=page,
        version=version,
    )
