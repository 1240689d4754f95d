"""The steps of the pipeline `automl` as KFP sees them."""

from kfp import dsl

from steadytrain.components.shared.environment import TRAIN_IMAGE
from steadytrain.components.train.component import PASSED_ON


@dsl.component(
    base_image=TRAIN_IMAGE, install_kfp_package=False, task_config_passthroughs=PASSED_ON
)
def search(
    resolved: dsl.Input[dsl.Artifact],
    study: dsl.Output[dsl.Artifact],
    best: dsl.Output[dsl.Artifact],
    board: dsl.Output[dsl.Artifact],
    result: dsl.Output[dsl.Metrics],
    task: dsl.TaskConfig = None,  # KFP fills this in only if the default is None
) -> None:
    """Search for the best model on folds. Continue the search if it has begun."""
    arguments = locals()
    from steadytrain.components.automl.step import kfp_search

    kfp_search(**arguments)


@dsl.component(base_image=TRAIN_IMAGE, install_kfp_package=False)
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
    """Write pages on the search's run and on its winner's, and how the winner was judged."""
    arguments = locals()
    from steadytrain.components.automl.step import kfp_report

    kfp_report(**arguments)
