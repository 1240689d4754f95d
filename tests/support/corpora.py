"""Large amounts of real text: this environment's Python sources, a hundred lines per record."""

from __future__ import annotations

import itertools
import json
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

_LINES: Final = 100


def write_sources(files: Sequence[Path], megabytes: float) -> int:
    """Write JSON lines with a `text` field, cycling through the files.

    Returns:
        The number of records.
    """
    handles = [path.open("w", encoding="utf-8") for path in files]
    size = count = 0
    for text, handle in zip(source_texts(), itertools.cycle(handles)):
        if size >= megabytes * 1e6:
            break
        size += handle.write(json.dumps({"text": text}) + "\n")
        count += 1
    for handle in handles:
        handle.close()
    assert size >= megabytes * 1e6, f"there are but {size / 1e6:.0f} MB of sources"
    return count


def source_texts() -> Iterator[str]:
    """Yield the texts of the standard library first, then of the installed packages."""
    paths = sysconfig.get_paths()
    library, installed = Path(paths["stdlib"]), Path(paths["purelib"])
    own = (path for path in sorted(library.rglob("*.py")) if "site-packages" not in path.parts)
    for path in itertools.chain(own, sorted(installed.rglob("*.py"))):
        try:
            lines = path.read_text("utf-8").splitlines(keepends=True)
        except (OSError, UnicodeDecodeError):
            continue
        for start in range(0, len(lines), _LINES):
            text = "".join(lines[start : start + _LINES])
            if text.strip():
                yield text
