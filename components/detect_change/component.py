"""The check for new data as a KFP component."""

from kfp import dsl

from steadytrain.components.shared.environment import STEP_IMAGE


@dsl.component(base_image=STEP_IMAGE, install_kfp_package=False)
def detect_change(
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
) -> bool:
    """Return whether the data changed enough to train again."""
    arguments = locals()
    from steadytrain.components.detect_change.step import kfp_detect_change

    return kfp_detect_change(**arguments)
