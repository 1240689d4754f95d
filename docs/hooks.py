"""Adds pages while MkDocs builds: those of techniques from their folders, and the reference.

The reference is generated, and nothing of it is committed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

# MkDocs loads this file by its path; `reference` is next to it.
sys.path.insert(0, str(Path(__file__).parent))

from reference.pages import PAGES

DOCS = Path(__file__).parent


def techniques() -> dict[str, Path]:
    """Return the page of each technique by its address, in the order of their titles."""
    found = {
        f"techniques/{page.parent.name.replace('_', '-')}.md": page
        for page in (DOCS.parent / "components" / "techniques").glob("*/page.md")
    }
    found |= {f"techniques/{page.name}": page for page in (DOCS / "techniques").glob("*.md")}
    del found["techniques/index.md"]
    return dict(sorted(found.items(), key=lambda item: item[1].read_text(encoding="utf-8")))


def on_config(config: MkDocsConfig) -> None:
    """Lists the techniques after their overview."""
    assert config.nav is not None
    (section,) = (item["Techniques"] for item in config.nav if "Techniques" in item)
    section.extend(techniques())


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the techniques' pages that are in their folders, and a page for each generator."""
    for address, page in techniques().items():
        if not page.is_relative_to(DOCS):
            files.append(File.generated(config, address, abs_src_path=str(page)))
    for address, text in PAGES.items():
        files.append(File.generated(config, address, content=text()))
    return files
