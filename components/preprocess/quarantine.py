"""The quarantine file: every record that is not used, where it stands, and why."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from steadytrain.components.preprocess.validate import DEFECTS
from steadytrain.components.shared.config.secrets import redact

EXCERPT_CHARACTERS: Final = 400


@dataclass(frozen=True)
class Entry:
    """A record that is not used.

    line: of the file; the row, where a file has rows; 1, where the file is the record.
    duplicate_of: the content hash of the record that it duplicates.
    """

    source: str
    line: int
    reason: str
    detail: str = ""
    id: str = ""
    duplicate_of: str = ""
    excerpt: str = ""


class Quarantine:
    """Appends entries to a file of JSON lines, and counts them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.counts: Counter[str] = Counter()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handle = path.open("w", encoding="utf-8", errors="backslashreplace")

    def add(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self.counts[entry.reason] += 1
            content = asdict(entry) | {
                "detail": redact(entry.detail),
                "excerpt": redact(entry.excerpt),
            }
            self._handle.write(json.dumps(content, ensure_ascii=False) + "\n")

    def close(self) -> None:
        self._handle.close()

    @property
    def defects(self) -> int:
        """Records with a fault of their own."""
        return sum(self.counts[reason] for reason in DEFECTS)


def reason_table(counts: Counter[str], total: int) -> str:
    """Counts by reason, as text."""
    lines = [
        f"  {reason:<26}{count:>10}  {count / max(1, total):>7.2%}"
        for reason, count in counts.most_common()
    ]
    return "\n".join([f"  {'reason':<26}{'records':>10}  {'share':>7}", *lines])
