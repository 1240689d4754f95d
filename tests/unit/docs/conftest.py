"""Makes the generators of the reference importable, as MkDocs does."""

from __future__ import annotations

import sys

from support.snippets import ROOT

sys.path.insert(0, str(ROOT / "docs"))
