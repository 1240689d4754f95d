"""Find secrets in a configuration.

A configuration must not contain any, because it ends up in parameters, logs and artifacts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from steadytrain.components.shared.errors import Problem
from steadytrain.components.shared.redaction import (
    PLACEHOLDER,
    holds_a_secret,
    names_a_secret,
    redact,
)

__all__ = ["PLACEHOLDER", "find_secrets", "names_a_secret", "redact"]

_SHORT_NAME = re.compile(r"(?:^|[_.-])(?:pass|pw|auth)$", re.IGNORECASE)
"""Names of secrets in a mapping. In free text they are ordinary words."""
_FLAG = re.compile(r"--[\w.-]+")
"""A flag whose value is the next argument. --name=value contains its own."""
_ADDRESS = re.compile(r"\s*[A-Za-z][\w+.-]*:\s*[/\\]\s*[/\\]")
_REFERENCE = "secretKeyRef"
_COPIED = re.compile(r"[\w.-]+:[^\s/@]+@[\w.-]+[:/]\S*")
"""user:password@host:path, as scp accepts it."""


def find_secrets(content: Any, field: str = "") -> Iterator[Problem]:
    """Yield a problem for each place in a nested configuration that contains a secret.

    The problems do not repeat the secret's value.
    """
    if isinstance(content, dict):
        for key, value in content.items():
            name = str(key)
            inner = f"{field}.{redact(name)}" if field else redact(name)
            # Kubernetes writes variables as {name: HF_TOKEN, value: ...}.
            of = str(content.get("name", "")) if key == "value" else name
            if name == _REFERENCE and isinstance(value, dict):
                # It names a Secret and a key of it, which may be called what they like.
                yield from find_secrets(list(value.values()), inner)
            elif _is_secret_value(of, value) or holds_a_secret(name):
                yield _problem(inner)
            else:
                yield from find_secrets(value, inner)
    elif isinstance(content, list | tuple | set):
        before = ""
        for index, value in enumerate(content):
            inner = f"{field}[{index}]"
            if _FLAG.fullmatch(before) and _is_secret_value(before, value):
                yield _problem(inner)
            else:
                yield from find_secrets(value, inner)
            before = value if isinstance(value, str) else ""
    elif isinstance(content, bytes):
        yield from find_secrets(content.decode("latin-1"), field)
    elif isinstance(content, str) and any(map(holds_a_secret, (content, _tight(content)))):
        yield _problem(field)


def _is_secret_value(name: str, value: Any) -> bool:
    """Return whether this is the value of a secret.

    A number can be one. A boolean or an empty value cannot; a boolean only says whether a secret
    exists.
    """
    if not value or isinstance(value, bool):
        return False
    short = bool(_SHORT_NAME.search(name)) and not isinstance(value, dict | list)
    return names_a_secret(name) or short


def _tight(text: str) -> str:
    """Normalize an address as lenient drivers read it.

    Remove whitespace, turn backslashes into slashes, and write user:password@host:path as ssh://.
    """
    if _ADDRESS.match(text):
        return "".join(text.split()).replace("\\", "/")
    return f"ssh://{text}" if _COPIED.fullmatch(text) else text


def _problem(field: str) -> Problem:
    return Problem(
        field=field,
        value=PLACEHOLDER,
        message="contains a secret, which would end up in parameters, logs and artifacts",
        remedy="remove it and set it in the environment (HF_TOKEN, AWS_*, MLFLOW_TRACKING_*) "
        "or in a Kubernetes Secret; if it was real, revoke it",
    )
