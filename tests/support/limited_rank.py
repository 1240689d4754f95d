"""A rank of the real loop under a memory limit: `limited_rank.py BYTES FOLDER`; 0: no limit.

The limit is on the address space, whose peak the kernel keeps: the rank leaves it in FOLDER/peak.
"""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

from steadytrain.components.train.loop.main import main


def peak() -> int:
    """Bytes of address space that this process had at most."""
    found = re.search(r"VmPeak:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


if __name__ == "__main__":
    limit, folder = int(sys.argv[1]), sys.argv[2]
    if limit:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    status = main(folder)
    Path(folder, "peak").write_text(str(peak()))
    sys.exit(status)
