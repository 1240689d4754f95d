"""Adds the generated reference pages while MkDocs builds; nothing of them is committed."""

from __future__ import annotations

import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

# MkDocs loads this file by its path; `reference` lies beside it.
sys.path.insert(0, str(Path(__file__).parent))

from reference.pages import PAGES


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for each generator."""
    for address, text in PAGES.items():
        files.append(File.generated(config, address, content=text()))
    return files
