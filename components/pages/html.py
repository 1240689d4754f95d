"""Render pages from templates, in one style. A page needs no other file, and runs no script."""

from __future__ import annotations

import time
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from steadytrain.components.shared.quantities import amount, duration, moment, number, size
from steadytrain.components.shared.redaction import redact, without_controls


def html(template: str, **values: Any) -> str:
    """Return a page as HTML. What it shows may be hostile: every text is escaped."""
    page = _environment().get_template(f"{template}.html.j2")
    return page.render(css=Markup(style()), written=moment(time.time()), **values)


@cache
def style() -> str:
    """Return the style sheet of all pages."""
    return (resources.files(__package__) / "style.css").read_text(encoding="utf-8")


def _fit_to_show(value: object) -> object:
    """Return what a page may show: a message or a log may hold secrets and a terminal's codes."""
    return redact(without_controls(value)) if type(value) is str else value


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        finalize=_fit_to_show,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    formats = (amount, duration, moment, number, size)
    environment.filters |= {one.__name__: one for one in formats}
    environment.globals["parts"] = environment.get_template("parts.html.j2").module
    return environment
