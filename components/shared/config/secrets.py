"""Finding secrets where none belongs: configuration, parameters, logs.

A secret is recognised by its own published prefix or by a password inside an
address, so that ordinary text is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from steadytrain.components.shared.errors import Problem

_VALUE = re.compile(
    r"""
    \bhf_[A-Za-z0-9]{30,}                      # Hugging Face token
    | \b(?:AKIA|ASIA)[A-Z0-9]{16}\b            # AWS access key id
    | \bgh[pousr]_[A-Za-z0-9]{30,}             # GitHub token
    | \bsk-[A-Za-z0-9_-]{20,}                  # API key of several services
    | \bxox[abpr]-[A-Za-z0-9-]{10,}            # Slack token
    | \bhooks\.slack\.com/services/\S+          # Slack webhook
    | \beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.  # JSON web token
    | -----BEGIN\ [A-Z ]*PRIVATE\ KEY-----
    | (?<=://)[^/\s:@]*:[^/\s@]+(?=@)          # user:password@ in an address
    """,
    re.VERBOSE,
)
_KEY = re.compile(
    r"(?:^|_)(?:password|passwd|secret|secret_key|api_key|apikey|access_key|"
    r"private_key|auth_token|access_token|hf_token|token|credentials?)$",
    re.IGNORECASE,
)
PLACEHOLDER = "[redacted]"


def redact(text: str) -> str:
    """`text` with everything in it that looks like a secret replaced."""
    return _VALUE.sub(PLACEHOLDER, text)


def names_a_secret(key: str) -> bool:
    """Whether a field or parameter of this name holds a secret."""
    return bool(_KEY.search(key))


def find_secrets(content: Any, field: str = "") -> Iterator[Problem]:
    """Each place of a nested configuration that holds a secret; its value is not repeated."""
    if isinstance(content, dict):
        for key, value in content.items():
            inner = f"{field}.{key}" if field else str(key)
            if names_a_secret(str(key)) and isinstance(value, str) and value:
                yield _problem(inner)
            else:
                yield from find_secrets(value, inner)
    elif isinstance(content, list):
        for index, value in enumerate(content):
            yield from find_secrets(value, f"{field}[{index}]")
    elif isinstance(content, str) and _VALUE.search(content):
        yield _problem(field)


def _problem(field: str) -> Problem:
    return Problem(
        field=field,
        value=PLACEHOLDER,
        message="holds a secret, which would end up in parameters, logs and artifacts",
        remedy="take it out and give it by environment (HF_TOKEN, AWS_*, MLFLOW_TRACKING_*) "
        "or by a Kubernetes Secret; if it was real, revoke it",
    )
