"""The quarantine file: every record that is not used, its location, and the reason."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from steadytrain.components.shared.config.document import shortened
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.left_out import SET_ASIDE
from steadytrain.components.shared.redaction import on_one_line
from steadytrain.components.shared.storage.local import local_errors
from steadytrain.components.tasks.encoding.fields import DEFECTS, NO_CLASS_REMEDY

EXCERPT_CHARACTERS: Final = 400
_EXAMPLE_CHARACTERS: Final = 200
_TURNS: Final = 8
"""Items of a list in an excerpt."""
_COLUMNS: Final = "name the right columns in data.columns"
_ADVICE: Final = {
    "bad_encoding": "save the files as UTF-8, or set data.csv.encoding for CSV files",
    "bad_format": "set data.format or data.csv",
    "missing_field": _COLUMNS,
    "empty_field": _COLUMNS,
    "contradicted": "drop or rename the column, or name it in data.columns.slice",
    "not_a_class": NO_CLASS_REMEDY,
    "unknown_label": "add the labels to data.labels, or leave data.labels out",
    "too_long": "raise data.max_record_bytes",
    "huge_image": "raise data.images.max_pixels",
    "refused_by_template": "set data.chat_template to one that accepts them",
}
"""By reason: what may help instead of a change to the records."""
_FEW: Final = 0.2
"""Share of defective records above which going on without them is no advice."""


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


def excerpt_of(row: Mapping[str, Any], needed: Iterable[str]) -> str:
    """Return the start of a raw record: first the columns that the task needs, long texts cut."""
    plain = dict(row)
    first = {name: plain[name] for name in needed if name in plain}
    return str(_brief({**first, **plain}))[:EXCERPT_CHARACTERS]


def _brief(value: Any) -> Any:
    if isinstance(value, str):
        return shortened(value)
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    if isinstance(value, Mapping):
        return {name: _brief(item) for name, item in value.items()}
    return [_brief(item) for item in value[:_TURNS]] if isinstance(value, list) else value


class Quarantine:
    """Appends entries to a JSON Lines file, and counts them. StorageError: it cannot be written.

    first: the first entry, by reason.
    kept: bytes of the file that are there already, and stay.
    """

    def __init__(self, path: Path, *, kept: int = 0) -> None:
        self.path = path
        self.counts: Counter[str] = Counter()
        self.first: dict[str, Entry] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if kept:
            os.truncate(path, kept)
            for line in path.read_text(encoding="utf-8").removesuffix("\n").split("\n"):
                entry = Entry(**json.loads(line))
                self.counts[entry.reason] += 1
                self.first.setdefault(entry.reason, entry)
        mode = "a" if kept else "w"
        self._handle = path.open(mode, encoding="utf-8", errors="backslashreplace")

    def add(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self.counts[entry.reason] += 1
            shown = replace(entry, detail=redact(entry.detail), excerpt=redact(entry.excerpt))
            self.first.setdefault(entry.reason, shown)
            line = json.dumps(asdict(shown), ensure_ascii=False) + "\n"
            with local_errors("write", self.path):
                self._handle.write(line)

    def flush(self) -> None:
        with local_errors("write", self.path):
            self._handle.flush()

    def close(self) -> None:
        # This writes what an earlier error has left.
        with local_errors("write", self.path):
            self._handle.close()

    @property
    def defects(self) -> int:
        """Return the number of records that are defective themselves."""
        return sum(self.counts[reason] for reason in DEFECTS)

    def table(self, total: int) -> str:
        """Return the counts by reason as text, each with its meaning and its first record.

        Args:
            total: number of records read.
        """
        meanings = DEFECTS | SET_ASIDE
        lines = [f"  {'reason':<26}{'records':>10}  {'share':>7}  meaning"]
        for reason, count in self.counts.most_common():
            share = count / max(1, total)
            lines.append(f"  {reason:<26}{count:>10}  {share:>7.2%}  {meanings[reason]}")
            lines += [f"    {line}" for line in self._example(reason)]
        return "\n".join(lines)

    def warning(self, total: int) -> str:
        """Return the counts of the defects in one line, each with its first record; "" for none.

        Args:
            total: number of records read.
        """
        listed = "; ".join(
            f"{count:,} {reason} ({': '.join(self._example(reason))})"
            for reason, count in self.counts.most_common()
            if reason in DEFECTS
        )
        message = f"{self.defects:,} of {total:,} records are defective: {listed}"
        return message if listed else ""

    def advice(self, total: int) -> str:
        """Return what can help against the defects.

        Args:
            total: number of records read.
        """
        most = max(DEFECTS, key=self.counts.__getitem__)
        choices = ["fix the records that the quarantine file lists", _ADVICE.get(most, "")]
        if self.defects <= _FEW * total:
            choices.append("raise data.max_bad_share")
        return ", or ".join(filter(None, choices))

    def _example(self, reason: str) -> list[str]:
        """Return where the first record is and what is wrong with it, and its beginning."""
        first = self.first[reason]
        example = f"the first is line {first.line} of {first.source}"
        sentence = f"{example}: {first.detail}" if first.detail else example
        excerpt = on_one_line(first.excerpt)
        if len(excerpt) > _EXAMPLE_CHARACTERS:
            excerpt = f"{excerpt[: _EXAMPLE_CHARACTERS - 3]}..."
        return [on_one_line(sentence), *([excerpt] if excerpt else [])]
