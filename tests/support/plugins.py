"""A third-party package, installed into a folder of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "plugins"


def install_example(folder: Path) -> Path:
    """Install tests/plugins; return the folder to add to the Python path."""
    # Copy the sources, because the build writes files next to them.
    sources, target = folder / "sources", folder / "site"
    shutil.copytree(SOURCE, sources, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"),
            *("--no-build-isolation", "--target", str(target), str(sources)),
        ],
        check=True,
    )
    return target
