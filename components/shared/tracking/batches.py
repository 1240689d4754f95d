"""Batches for MLflow, one item of which must not hold up the others.

A store takes a batch or refuses it whole. What it refuses for good (a name that it
does not take, a parameter that has another value there) is found by halves, and kept
in a file; everything else is sent.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.tracking.connect import Tracking, import_mlflow
from steadytrain.components.shared.tracking.notes import warn
from steadytrain.components.shared.tracking.values import (
    MAX_METRICS_A_CALL,
    MAX_PARAMS_A_CALL,
    in_parts,
)
from steadytrain.components.shared.workspace import Workspace

if TYPE_CHECKING:
    from mlflow.entities import Metric, Param, RunTag

_MAY_YET_BE_TAKEN = {401, 403, 404, 408, 429}
"""Answers of 400 to 499 that are no verdict on what was sent."""


class Batches:
    """Sends parameters, metrics and tags to an open store; raises what MLflow raises.

    file: JSON, an item a line, of what was refused for good, with the reason.
    """

    def __init__(self, tracking: Tracking, workspace: Workspace, parent: str) -> None:
        self.client, self.workspace = tracking.client, workspace
        self.file = workspace.tracking / parent / "refused.jsonl"

    def send(
        self,
        run_id: str,
        *,
        params: Sequence[Param] = (),
        metrics: Sequence[Metric] = (),
        tags: Sequence[RunTag] = (),
    ) -> None:
        """Sends items to a run, whatever their number."""
        kinds: list[tuple[str, Sequence[Any], int]] = [
            ("params", params, MAX_PARAMS_A_CALL),
            ("metrics", metrics, MAX_METRICS_A_CALL),
            ("tags", tags, MAX_PARAMS_A_CALL),
        ]
        for kind, items, most in kinds:
            for part in in_parts(items, most):
                self._send(run_id, kind, part)

    def _send(self, run_id: str, kind: str, items: Sequence[Any]) -> None:
        mlflow = import_mlflow()
        try:
            self.client.log_batch(run_id, **{kind: items})
        except mlflow.MlflowException as error:
            if not _is_for_good(error):
                raise
            if len(items) > 1:
                for half in in_parts(items, (len(items) + 1) // 2):
                    self._send(run_id, kind, half)
                return
            # A run that was deleted, or a store that takes nothing at all, is no verdict either.
            self.client.log_batch(
                run_id, tags=[mlflow.entities.RunTag("steadytrain.refused", str(self.file))]
            )
            self._keep(run_id, kind, items[0], str(error))

    def _keep(self, run_id: str, kind: str, item: Any, reason: str) -> None:
        told = {"run_id": run_id, "kind": kind, **dict(item), "reason": redact(reason)}
        line = json.dumps(told, default=str)
        known = self.file.read_text().splitlines() if self.file.is_file() else []
        if line in known:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a") as handle:
            handle.write(f"{line}\n")
        if not known:
            first = redact(reason).partition("\n")[0]
            warn(
                self.workspace,
                f"MLflow refuses {item.key!r} for good ({first[:200]}); what it refuses is kept "
                f"in {self.file}, and all else is sent",
            )


def _is_for_good(error: Any) -> bool:
    status = int(error.get_http_status_code())
    return 400 <= status < 500 and status not in _MAY_YET_BE_TAKEN
