"""Properties are judged by what they find, not by how fast a busy machine is."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("steadytrain", deadline=None)
settings.load_profile("steadytrain")
