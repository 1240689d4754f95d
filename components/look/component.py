"""The look at the data as KFP sees it."""

from kfp import dsl

from steadytrain.components.shared.image import STEP_IMAGE


@dsl.component(base_image=STEP_IMAGE, install_kfp_package=False)
def look(
    config: str,
    run: str,
    output: str,
    data_source: str,
    base_model: str,
    global_batch_size: int,
    learning_rate: float,
    num_train_epochs: float,
    overrides: dict,  # type: ignore[type-arg]  # KFP knows no dict[str, Any]
    job: str,
    page: dsl.Output[dsl.HTML],
) -> bool:
    """Tells whether there are data that no model at hand has learned from."""
    from steadytrain.components.look import artifacts

    return artifacts.look(
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
