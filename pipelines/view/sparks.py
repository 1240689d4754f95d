"""A curve without axes: as one line of text, or as a small picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from markupsafe import Markup

from steadytrain.components.report.curves import thin
from steadytrain.components.report.words import number

_BARS: Final = "▁▂▃▄▅▆▇█"
_WIDTH, _HEIGHT, _MARGIN = 96, 22, 2


def spark_line(values: Sequence[float], width: int = 24) -> str:
    """Draw values with at most `width` bars of text; values that are not finite are left out."""
    finite = [(float(index), value) for index, value in enumerate(values) if math.isfinite(value)]
    drawn = [value for _, value in thin(finite, width)][-width:]
    return "".join(_BARS[round(share * (len(_BARS) - 1))] for share in _shares(drawn))


def spark_picture(values: Sequence[float]) -> Markup:
    """Draw finite values as SVG, or return "" if there are fewer than two."""
    if len(values) < 2:
        return Markup("")
    across, up = _WIDTH / (len(values) - 1), _HEIGHT - 2 * _MARGIN
    points = " ".join(
        f"{index * across:.1f},{_HEIGHT - _MARGIN - share * up:.1f}"
        for index, share in enumerate(_shares(values))
    )
    return Markup(
        '<svg class="spark" viewBox="0 0 {} {}" role="img" aria-label="loss from {} to {}">'
        '<polyline class="line c0" points="{}"/></svg>'
    ).format(_WIDTH, _HEIGHT, number(values[0]), number(values[-1]), points)


def _shares(values: Sequence[float]) -> list[float]:
    """Return where each value is between the lowest, 0, and the highest, 1."""
    # Halves, because the difference of two large floats may be infinite.
    low, high = min(values, default=0.0) / 2, max(values, default=0.0) / 2
    return [(value / 2 - low) / ((high - low) or 1.0) for value in values]
