"""What a process runs on: packages, the user's code, container images, and the caller's span."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from steadytrain.components.shared.digest import IMAGE_DIGEST_VARIABLE
from steadytrain.components.shared.errors import BadInput

_PACKAGES: Final = (
    "steadytrain", "torch", "transformers", "tokenizers", "accelerate", "peft", "bitsandbytes",
    "deepspeed", "liger-kernel", "numpy", "scikit-learn",
)  # fmt: skip


@functools.cache
def environment() -> dict[str, str]:
    """Return the versions by name. A package that is not installed is left out."""
    return versions("system", _PACKAGES)


def versions(system: str, packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python, the system (under that name) and the installed packages."""
    result = {"python": platform.python_version(), system: platform.platform()}
    for package in packages:
        try:
            result[package] = version(package)
        except PackageNotFoundError:
            continue
    return result


COMMIT = "mlflow.source.git.commit"
DIFF, IMAGE = "steadytrain.git_diff_digest", "steadytrain.image_digest"
ORIGIN = (COMMIT, DIFF, IMAGE)
"""Tags of a run and of a model version. MLflow shows the first one."""

_SECONDS = 20.0


@functools.cache
def code_origin() -> dict[str, str]:
    """Return the tags of ORIGIN that are known in the current folder.

    The digest is over the difference of tracked files to the commit, and is missing if there is
    none. Pods have no repository; they know their image.
    """
    origin = {COMMIT: _git("rev-parse", "HEAD").decode().strip()}
    if origin[COMMIT] and (changes := _git("diff", "HEAD", "--binary", "--no-ext-diff")):
        origin[DIFF] = hashlib.sha256(changes).hexdigest()
    origin[IMAGE] = os.environ.get(IMAGE_DIGEST_VARIABLE, "")
    return {name: value for name, value in origin.items() if value}


def _git(*arguments: str) -> bytes:
    """Return what git prints; nothing if there is no git, no repository or no commit."""
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return done.stdout if done.returncode == 0 else b""


REGISTRY_VARIABLE: Final = "STEADYTRAIN_REGISTRY"
"""Registry that the nodes pull images from, such as registry.example.com/team. If unset, they use
their default registry."""
_REGISTRY: Final = r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?(:\d+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*"


def image(kind: str) -> str:
    """Return the full name of the "step" or "train" image.

    Raises:
        BadInput: if STEADYTRAIN_REGISTRY is not the address of a registry.
    """
    registry = os.environ.get(REGISTRY_VARIABLE, "")
    if registry and not re.fullmatch(_REGISTRY, registry):
        raise BadInput(
            f"{REGISTRY_VARIABLE} = {registry!r} is not the address of a registry",
            remedy="give HOST[:PORT][/PATH] without a scheme, a tag or a slash at the end, such as "
            "registry.example.com/team",
        )
    return "/".join(filter(None, [registry, f"steadytrain/{kind}:{version('steadytrain')}"]))


STEP_IMAGE = image("step")
"""Image of the steps that do not train. It has no torch."""

TRAIN_IMAGE = image("train")
"""Image for training, evaluation and registration."""


TRACEPARENT: Final = "TRACEPARENT"
"""Variable with the span."""

FORM: Final = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})"
)
"""Version, trace id, span id and flags; the last three are groups."""


def callers_span() -> str:
    """Return the span of this process's caller; "" if the variable names none."""
    text = os.environ.get(TRACEPARENT, "").strip()
    return text if FORM.fullmatch(text) else ""
