"""Find secrets in a configuration.

A configuration must not contain any, because it ends up in parameters, logs and artifacts.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

from steadytrain.components.shared.errors import Problem
from steadytrain.components.shared.redaction import (
    PLACEHOLDER,
    contains_secret,
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


def find_secrets(content: Any) -> Iterator[Problem]:
    """Yield a problem for each place in a nested configuration that contains a secret.

    The problems do not repeat the secret's value.
    """
    for path in _paths(content, ()):
        yield _problem(functools.reduce(_below, path, ""))


def _below(field: str, key: str | int) -> str:
    """Return the name of what a field has at a key, which may be a secret itself."""
    if isinstance(key, int):
        return f"{field}[{key}]"
    return f"{field}.{redact(key)}" if field else redact(key)


def _paths(content: Any, path: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    """Yield the keys and indices that lead to each secret."""
    if isinstance(content, dict):
        for key, value in content.items():
            name = str(key)
            inner = (*path, name)
            # Kubernetes writes variables as {name: HF_TOKEN, value: ...}.
            of = str(content.get("name", "")) if key == "value" else name
            if name == _REFERENCE and isinstance(value, dict):
                # It names a Secret and a key of it, which may be called what they like.
                yield from _paths(list(value.values()), inner)
            elif _is_secret_value(of, value) or contains_secret(name):
                yield inner
            else:
                yield from _paths(value, inner)
    elif isinstance(content, list | tuple | set):
        before = ""
        for index, value in enumerate(content):
            inner = (*path, index)
            if _FLAG.fullmatch(before) and _is_secret_value(before, value):
                yield inner
            else:
                yield from _paths(value, inner)
            before = value if isinstance(value, str) else ""
    elif isinstance(content, bytes):
        yield from _paths(content.decode("latin-1"), path)
    elif isinstance(content, str) and any(map(contains_secret, (content, _tight(content)))):
        yield path


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
