"""Check that the packages of an extra are installed, before a command touches anything."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final, Literal

from steadytrain.components.shared.errors import BadInput

Extra = Literal["data", "train"]

_DATA: Final = ("mlflow", "numpy", "pyarrow", "tokenizers", "transformers", "zstandard")
_MODULES: Final = {
    "data": _DATA,
    "train": (
        *_DATA,
        *("accelerate", "optuna", "peft", "safetensors", "scipy", "sklearn", "sqlalchemy", "torch"),
    ),
}
"""By extra, modules without which nothing of it works. Others, such as deepspeed, are only needed
for the settings that name them."""


def check_extra(extra: Extra, command: str) -> None:
    """Check that an extra is installed, without importing anything.

    Raises:
        BadInput: a package is missing. The fix is the command that installs the extra.
    """
    missing = [name for name in _MODULES[extra] if find_spec(name) is None]
    if missing:
        needs = ", ".join(missing)
        raise BadInput(
            f"{command} needs packages that are not installed here: {needs}",
            remedy=f"pip install 'steadytrain[{extra}]'",
        )
