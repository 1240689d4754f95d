"""Names and values as MLflow accepts them. If one is too long, it rejects the complete batch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.tracking.connect import Tracking, import_mlflow
from steadytrain.components.shared.tracking.notes import warn
from steadytrain.components.shared.workspace import Workspace

if TYPE_CHECKING:
    from mlflow.entities import Metric, Param, RunTag


MAX_KEY = 250
MAX_VALUE = 6000
MAX_PARAMS_A_CALL = 100
MAX_METRICS_A_CALL = 1000
MAX_ITEMS_A_CALL = 1000
"""Metrics, parameters and tags together."""

T = TypeVar("T")


def key(name: str) -> str:
    """Return a name that MLflow accepts as the key of a parameter or metric."""
    return re.sub(r"[^\w\-./: ]", "_", name)[:MAX_KEY]


def value(content: object) -> str:
    """Return the text of a parameter or tag: without secrets, and cut to MLflow's limit."""
    text = redact(str(content))
    return text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE - 3]}..."


def flatten(content: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield nested plain data as pairs of dotted key and text."""
    if isinstance(content, dict) and content:
        for name, inner in content.items():
            yield from flatten(inner, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield key(prefix), value(content)


def in_batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield slices of at most `size` items."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


# Batches for MLflow, in which one bad item does not block the others.
#
# A store accepts or rejects a batch as a unit. Items that it rejects permanently (an invalid name,
# a parameter that already has another value) are found by bisection and kept in a file. Everything
# else is sent.

_MAY_YET_BE_TAKEN = {401, 403, 404, 408, 429}
"""Status codes from 400 to 499 that say nothing about the items sent."""


class Batches:
    """Sends parameters, metrics and tags to an open store. Raises what MLflow raises.

    file: JSON, one item per line, with the permanently rejected items and the reasons.
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
        """Send any number of items to a run."""
        kinds: list[tuple[str, Sequence[Any], int]] = [
            ("params", params, MAX_PARAMS_A_CALL),
            ("metrics", metrics, MAX_METRICS_A_CALL),
            ("tags", tags, MAX_PARAMS_A_CALL),
        ]
        for kind, items, most in kinds:
            for part in in_batches(items, most):
                self._send(run_id, kind, part)

    def _send(self, run_id: str, kind: str, items: Sequence[Any]) -> None:
        mlflow = import_mlflow()
        try:
            self.client.log_batch(run_id, **{kind: items})
        except mlflow.MlflowException as error:
            if not _is_for_good(error):
                raise
            if len(items) > 1:
                for half in in_batches(items, (len(items) + 1) // 2):
                    self._send(run_id, kind, half)
                return
            # If the run was deleted or the store accepts nothing at all, the item is not at fault.
            # Then this call fails too.
            self.client.log_batch(
                run_id, tags=[mlflow.entities.RunTag("steadytrain.refused", str(self.file))]
            )
            self._keep(run_id, kind, items[0], str(error))

    def _keep(self, run_id: str, kind: str, item: Any, reason: str) -> None:
        content = {"run_id": run_id, "kind": kind, **dict(item), "reason": redact(reason)}
        line = json.dumps(content, default=str)
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
                f"MLflow rejects {item.key!r} permanently ({first[:200]}); rejected items are "
                f"kept in {self.file}, and everything else is sent",
            )


def _is_for_good(error: Any) -> bool:
    status = int(error.get_http_status_code())
    return 400 <= status < 500 and status not in _MAY_YET_BE_TAKEN
