"""Disable Hypothesis deadlines: tests check results, not the speed of a busy machine."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("steadytrain", deadline=None)
settings.load_profile("steadytrain")
