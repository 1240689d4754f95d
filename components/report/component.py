"""The report step as a KFP component: the exit handler, which always runs."""

from kfp import dsl

from steadytrain.components.shared.environment import STEP_IMAGE


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
    """Write one page that explains what happened, on success and on failure."""
    from steadytrain.components.report import artifacts

    artifacts.report(
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
