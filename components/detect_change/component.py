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
    from steadytrain.components.detect_change import artifacts

    return artifacts.detect_change(
        parameters={
            "config": config,
            "run": run,
            "output": output,
            "data_source": data_source,
            "base_model": base_model,
            "global_batch_size": global_batch_size,
            "learning_rate": learning_rate,
            "num_train_epochs": num_train_epochs,
            "overrides": overrides,
            "job": job,
        },
        page=page,
    )
