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
    from steadytrain.components.preprocess import artifacts

    artifacts.preprocess(
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
        resolved=resolved,
        data=data,
        data_card=data_card,
        counts=counts,
    )
