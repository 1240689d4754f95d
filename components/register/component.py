"""The register step and the promotion as KFP sees them."""

from kfp import dsl

from steadytrain.components.shared.image import TRAIN_IMAGE


@dsl.component(base_image=TRAIN_IMAGE, install_kfp_package=False)
def register(
    resolved: dsl.Input[dsl.Artifact],
    decision: dsl.Input[dsl.Artifact],  # noqa: ARG001  only orders the steps
    version: dsl.Output[dsl.Artifact],
) -> None:
    """Registers the candidate as a version, whatever the gate said."""
    from steadytrain.components.register import artifacts

    artifacts.register(resolved=resolved, version=version)


@dsl.component(base_image=TRAIN_IMAGE, install_kfp_package=False)
def promote(
    resolved: dsl.Input[dsl.Artifact],
    version: dsl.Input[dsl.Artifact],  # noqa: ARG001  only orders the steps
    champion: dsl.Output[dsl.Artifact],
) -> None:
    """Gives the candidate the champion's alias, if the champion is still the one it beat."""
    from steadytrain.components.register import artifacts

    artifacts.promote(resolved=resolved, champion=champion)
