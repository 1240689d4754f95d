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
    arguments = locals()
    from steadytrain.components.report.step import kfp_report

    kfp_report(**arguments)
