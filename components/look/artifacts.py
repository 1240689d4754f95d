"""From a pipeline's parameters to the look at the data, and from its answer to KFP artifacts."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kfp import dsl

from steadytrain.components.look.step import look as looked
from steadytrain.components.shared.config import from_parameters


def look(*, parameters: Mapping[str, Any], page: dsl.HTML) -> bool:
    """Runs the step; leaves nothing in the workspace, since there may be no run to come."""
    news = looked(from_parameters(**parameters))
    print(news.reason)
    Path(page.path).write_text(f"<p>{html.escape(news.reason)}</p>", encoding="utf-8")
    page.metadata.update(reason=news.reason)
    return news.found
