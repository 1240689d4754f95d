"""The train step as KFP sees it."""

from kfp import dsl

from steadytrain.components.shared.image import TRAIN_IMAGE


@dsl.component(base_image=TRAIN_IMAGE, install_kfp_package=False)
def train(
    resolved: dsl.Input[dsl.Artifact],
    data: dsl.Input[dsl.Dataset],
    model: dsl.Output[dsl.Model],
    result: dsl.Output[dsl.Metrics],
) -> None:
    """Trains the model; goes on from the newest checkpoint where there is one."""
    from steadytrain.components.train import artifacts

    artifacts.train(resolved=resolved, data=data, model=model, result=result)
