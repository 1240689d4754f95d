"""HTML pages that load nothing from anywhere."""

from __future__ import annotations

import time
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from steadytrain.components.shared.quantities import moment, number


def html(template: str, **content: Any) -> str:
    """Return a page from a template that extends base.html.j2.

    Args:
        content: what the template shows, with `kind`, `name` and `tiles`.
    """
    environment = Environment(
        loader=PackageLoader("steadytrain.components.tune", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number}
    css = (resources.files("steadytrain.components.report") / "report.css").read_text("utf-8")
    page = environment.get_template(template)
    return page.render(css=Markup(css), written=moment(time.time()), **content)
