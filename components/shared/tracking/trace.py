"""The identity of a run's trace: one for all of its attempts, wherever they run."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from steadytrain.components.shared.environment import FORM, callers_span
from steadytrain.components.shared.errors import StorageError
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.tracking.notes import identity, recall
from steadytrain.components.shared.workspace import Workspace

_NOTE: Final = "traceparent"
_ALONE: Final = "none"
_SAMPLED: Final = 1


@dataclass(frozen=True)
class Trace:
    """A run's trace.

    All ids follow from the run: whoever builds a span again gives it the same id.

    identity: of the run.
    trace_id: 32 hexadecimal digits.
    caller: id of the span that the run belongs to, 16 hexadecimal digits; "" if there is none.
    sampled: whether the caller records its trace.
    """

    identity: str
    trace_id: str
    caller: str = ""
    sampled: bool = True

    @classmethod
    def of(cls, workspace: Workspace, span: str | None = None) -> Trace:
        """Return a run's trace.

        The run's first process decides: it joins the trace of a span, or begins one.

        Args:
            span: `observability.traceparent`; None means the one that TRACEPARENT names, if any.

        Raises:
            StorageError: this cannot be noted in the run's folder.
        """
        if not recall(workspace, _NOTE):
            note = span or callers_span() or _ALONE
            LocalStorage(workspace.tracking).write(_NOTE, note.encode(), if_absent=True)
        name = identity(workspace)
        joined = FORM.fullmatch(recall(workspace, _NOTE))
        if joined is None:
            return cls(name, _digest(name)[:32])
        return cls(name, joined[1], joined[2], bool(int(joined[3], 16) & _SAMPLED))

    def span_id(self, *what: object) -> str:
        """Return the id of the span that these words identify within the run."""
        return _digest(self.identity, *what)[:16]

    def traceparent(self, span_id: str) -> str:
        """Return TRACEPARENT for processes that a span starts."""
        return f"00-{self.trace_id}-{span_id}-{'01' if self.sampled else '00'}"


def attempt_span(trace: Trace, attempt: int) -> str:
    """Return the id of an attempt's span. Its pods get it before anything else knows the span."""
    return trace.span_id("attempt", attempt)


def attempt_traceparent(workspace: Workspace, attempt: int, span: str | None = None) -> str:
    """Return TRACEPARENT for an attempt's ranks; "" if the run's trace cannot be noted now.

    Args:
        span: as for `Trace.of`.
    """
    try:
        trace = Trace.of(workspace, span)
    except StorageError:
        return ""
    return trace.traceparent(attempt_span(trace, attempt))


def _digest(*words: object) -> str:
    return hashlib.sha256("/".join(map(str, words)).encode()).hexdigest()
