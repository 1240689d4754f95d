"""Write a study to an Optuna storage, for optuna-dashboard and Optuna's own plots."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Final

from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.redaction import redact
from steadytrain.components.tune.optuna_storage import frozen_trials
from steadytrain.components.tune.study import Study, study_name

_MARK: Final = "steadytrain"
"""Attribute of the studies that exports wrote."""


def check_storage(url: str) -> None:
    """Check that an Optuna storage can be used. If it is a database that is missing, create it.

    Raises:
        BadInput: it cannot be used.
    """
    import optuna

    with _storage_errors(url):
        optuna.get_all_study_names(url)


def export(study: Study, url: str) -> str:
    """Write a study, in place of what an earlier export wrote, and return its name there.

    Args:
        url: an Optuna storage, such as sqlite:///study.db.

    Raises:
        BadInput: the storage cannot be used, or has a study of that name that is no export.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    name = study_name(study.config)
    directions = [item.direction for item in study.tune.objectives]
    with _storage_errors(url):
        known = {item.study_name: item for item in optuna.get_all_study_summaries(url)}
        if name in known and _MARK not in known[name].user_attrs:
            raise BadInput(
                f"--export-optuna {redact(url)}: it has a study {name} that is not an export",
                remedy="delete it there, or give another storage",
            )
        if name in known:
            optuna.delete_study(study_name=name, storage=url)
        made = optuna.create_study(storage=url, study_name=name, directions=directions)
        with warnings.catch_warnings(
            action="ignore", category=optuna.exceptions.ExperimentalWarning
        ):
            made.set_user_attr(_MARK, True)
            made.set_metric_names([item.metric for item in study.tune.objectives])
        made.add_trials(frozen_trials(study.tune, study.history))
    return name


@contextlib.contextmanager
def _storage_errors(url: str) -> Iterator[None]:
    try:
        yield
    except BadInput:
        raise
    except Exception as error:
        # SQLAlchemy and the database's driver raise their own errors.
        raise BadInput(
            f"--export-optuna {redact(url)}: {redact(str(error))}",
            remedy="give an address that Optuna takes, such as sqlite:///study.db",
        ) from error
