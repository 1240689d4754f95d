"""The packages that steadytrain's own sinks need, and the extra that installs each."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from steadytrain.components.shared.errors import BadInput

_NEEDED: Final = {
    "mlflow": ("mlflow", "train"),
    "otlp": ("opentelemetry.exporter", "data"),
    "prometheus": ("prometheus_client", "train"),
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
}


def is_installed(sink: str) -> bool:
    """Return whether a sink's package is here, without importing it; true for others' sinks."""
    package, _ = _NEEDED.get(sink, ("", ""))
    try:
        return not package or find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def check_package(sink: str) -> None:
    """Check that a sink's package is here.

    Raises:
        BadInput: it is missing; the fix names the extra.
    """
    if not is_installed(sink):
        package, extra = _NEEDED[sink]
        raise BadInput(
            f"the sink {sink!r} needs the package {package.partition('.')[0]}, which is not "
            "installed",
            remedy=f"pip install 'steadytrain[{extra}]', or remove {sink} from tracking.sinks",
        )
