"""The folds before any run: how many records each has, if the data can be read here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from steadytrain.components.preprocess.fold_preview import preview_folds
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput, DataError, StorageError
from steadytrain.components.tune.fold_design import with_fold
from steadytrain.components.tune.history import Params


@dataclass(frozen=True)
class FoldSizes:
    """Records of each fold.

    sizes: None if the data were not read.
    why: the reason, if so.
    """

    sizes: Sequence[int] | None
    warnings: Sequence[str] = ()
    why: str = ""

    def __str__(self) -> str:
        if self.sizes is None:
            return f"not checked: {self.why}"
        least, most = min(self.sizes), max(self.sizes)
        return f"{least:,} in each fold" if least == most else f"{least:,} to {most:,} in a fold"


def fold_sizes(config: RunConfig) -> FoldSizes:
    """Divide the data of a cross-validation, if they can be read here.

    Raises:
        ConfigError: a run that holds out a fold is not possible.
        DataError: the data cannot be used, or not be divided.
    """
    held_out = with_fold(config, 0)
    try:
        found = preview_folds(held_out)
    except DataError:
        raise
    except (BadInput, StorageError) as error:
        return FoldSizes(None, why=error.message)
    return FoldSizes(found.sizes, found.warnings)


def checked_start(config: RunConfig) -> list[Params]:
    """Reject data that cannot be divided, before a new cross-validation is written to its log.

    Each run would fail on them, and the log would keep the name for these folds.

    Returns:
        No parameters: the design knows all runs.

    Raises:
        ConfigError, DataError: as for `fold_sizes`.
    """
    fold_sizes(config)
    return []
