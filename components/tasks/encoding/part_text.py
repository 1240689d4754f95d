"""Encode labeled texts of several data sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from steadytrain.components.shared.parts import label_in
from steadytrain.components.tasks.encoding.base import Content
from steadytrain.components.tasks.encoding.labeled_text import LabeledTextEncoder


class PartTextEncoder(LabeledTextEncoder):
    """Records with a text and its class. The class names its part, so rows need no column for it.

    It reads records with the settings of one part (`DataConfig.by_part`).
    """

    def read(self, row: Mapping[str, Any]) -> Content:
        content = super().read(row)
        return Content(content.text, label_in(self.data.part, str(content.label)))
