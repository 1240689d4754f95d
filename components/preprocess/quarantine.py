"""The quarantine file: every record that is not used, its location, and the reason."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from steadytrain.components.shared.config.plain import shortened
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.tasks.encoding.fields import DEFECTS

EXCERPT_CHARACTERS: Final = 400


@dataclass(frozen=True)
class Entry:
    """A record that is not used.

    line: line in the file, row in a file with rows, or 1 if the file is the record.
    duplicate_of: content hash of the record that this one duplicates.
    """

    source: str
    line: int
    reason: str
    detail: str = ""
    id: str = ""
    duplicate_of: str = ""
    excerpt: str = ""


def entry_of(
    record: Mapping[str, Any], reason: str, detail: str = "", *, duplicate_of: str = ""
) -> Entry:
    """Return the entry of a record in the spool."""
    return Entry(
        record["source"],
        record["line"],
        reason,
        detail,
        id=record["id"].hex(),
        duplicate_of=duplicate_of,
        excerpt=record["content"][:EXCERPT_CHARACTERS],
    )


class Quarantine:
    """Appends entries to a JSON Lines file, and counts them.

    first: the first entry, by reason.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.counts: Counter[str] = Counter()
        self.first: dict[str, Entry] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handle = path.open("w", encoding="utf-8", errors="backslashreplace")

    def add(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self.counts[entry.reason] += 1
            shown = replace(entry, detail=redact(entry.detail), excerpt=redact(entry.excerpt))
            self.first.setdefault(entry.reason, shown)
            self._handle.write(json.dumps(asdict(shown), ensure_ascii=False) + "\n")

    def close(self) -> None:
        self._handle.close()

    @property
    def defects(self) -> int:
        """Return the number of records that are defective themselves."""
        return sum(self.counts[reason] for reason in DEFECTS)

    def table(self, total: int) -> str:
        """Return the counts by reason as text, each with its first record.

        Args:
            total: number of records read.
        """
        lines = [f"  {'reason':<26}{'records':>10}  {'share':>7}"]
        for reason, count in self.counts.most_common():
            first = self.first[reason]
            lines += [
                f"  {reason:<26}{count:>10}  {count / max(1, total):>7.2%}",
                f"    the first is line {first.line} of {first.source}"
                + "".join(f": {shortened(part)}" for part in (first.detail, first.excerpt) if part),
            ]
        return "\n".join(lines)
