"""The preprocess step as KFP sees it."""

from kfp import dsl

from steadytrain.components.shared.environment import STEP_IMAGE


@dsl.component(base_image=STEP_IMAGE, install_kfp_package=False)
def preprocess(
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
    resolved: dsl.Output[dsl.Artifact],
    data: dsl.Output[dsl.Dataset],
    data_card: dsl.Output[dsl.HTML],
    counts: dsl.Output[dsl.Metrics],
) -> None:
    """Resolve the configuration; check, split, tokenize and pack the data."""
    arguments = locals()
    from steadytrain.components.preprocess.step import kfp_preprocess

    kfp_preprocess(**arguments)
