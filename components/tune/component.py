"""The steps of the pipelines `tune` and `cross-validate` as KFP sees them."""

from kfp import dsl

from steadytrain.components.shared.environment import STEP_IMAGE, TRAIN_IMAGE
from steadytrain.components.train.component import PASSED_ON


@dsl.component(
    base_image=TRAIN_IMAGE, install_kfp_package=False, task_config_passthroughs=PASSED_ON
)
def tune(
    resolved: dsl.Input[dsl.Artifact],
    data: dsl.Input[dsl.Dataset],
    best: dsl.Output[dsl.Artifact],
    summary: dsl.Output[dsl.Artifact],
    page: dsl.Output[dsl.HTML],
    result: dsl.Output[dsl.Metrics],
    task: dsl.TaskConfig = None,  # KFP fills this in only if the default is None
) -> bool:
    """Search for better settings. Continue the study if it has begun."""
    arguments = locals()
    from steadytrain.components.tune.step import kfp_tune

    return kfp_tune(**arguments)


@dsl.component(
    base_image=TRAIN_IMAGE, install_kfp_package=False, task_config_passthroughs=PASSED_ON
)
def cross_validate(
    config: str,
    run: str,
    output: str,
    data_source: str,
    base_model: str,
    global_batch_size: int,
    learning_rate: float,
    num_train_epochs: float,
    overrides: dict,  # type: ignore[type-arg]  # KFP does not support dict[str, Any]
    job: str,
    summary: dsl.Output[dsl.Artifact],
    predictions: dsl.Output[dsl.Dataset],
    page: dsl.Output[dsl.HTML],
    result: dsl.Output[dsl.Metrics],
    task: dsl.TaskConfig = None,  # KFP fills this in only if the default is None
) -> None:
    """Prepare the data, and train and score on every fold. Continue if it has begun."""
    arguments = locals()
    from steadytrain.components.tune.step import kfp_cross_validate

    kfp_cross_validate(**arguments)


@dsl.component(
    base_image=TRAIN_IMAGE, install_kfp_package=False, task_config_passthroughs=PASSED_ON
)
def train_winner(
    resolved: dsl.Input[dsl.Artifact],
    best: dsl.Input[dsl.Artifact],
    summary: dsl.Input[dsl.Artifact],
    winner: dsl.Output[dsl.Artifact],
    data: dsl.Output[dsl.Dataset],
    model: dsl.Output[dsl.Model],
    result: dsl.Output[dsl.Metrics],
    task: dsl.TaskConfig = None,  # KFP fills this in only if the default is None
) -> None:
    """Train the best configuration on fresh seeds. Resume runs that have begun."""
    arguments = locals()
    from steadytrain.components.tune.step import kfp_train_winner

    kfp_train_winner(**arguments)


@dsl.component(base_image=STEP_IMAGE, install_kfp_package=False)
def report(
    config: str,
    run: str,
    output: str,
    data_source: str,
    base_model: str,
    global_batch_size: int,
    learning_rate: float,
    num_train_epochs: float,
    overrides: dict,  # type: ignore[type-arg]  # KFP does not support dict[str, Any]
    job: str,
    page: dsl.Output[dsl.HTML],
) -> None:
    """Write a page on the study's run and one on its winner's, if any: always, also on failure."""
    arguments = locals()
    from steadytrain.components.tune.step import kfp_report

    kfp_report(**arguments)
