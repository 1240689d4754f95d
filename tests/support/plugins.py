"""A third-party package, installed into a folder of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "plugins"


def install_example(folder: Path) -> Path:
    """Install tests/plugins; return the folder to add to the Python path."""
    target = folder / "site"
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"),
            *("--no-build-isolation", "--target", str(target), str(SOURCE)),
        ],
        check=True,
    )
    return target


def write_plugin(folder: Path, group: str, name: str, text: str) -> Path:
    """Write an installed package with one entry, `Plugin` of a module with the given text.

    Return the folder to add to the Python path.
    """
    package = f"{name}_package"
    info = folder / f"{package}-2.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: {package}\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {package}:Plugin\n")
    (folder / f"{package}.py").write_text(text)
    return folder
