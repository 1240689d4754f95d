"""Where the user's code comes from: the commit, what differs from it, and the container image."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess

from steadytrain.components.shared.digest import IMAGE_DIGEST_VARIABLE

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
    found = {COMMIT: _git("rev-parse", "HEAD").decode().strip()}
    if found[COMMIT] and (changes := _git("diff", "HEAD", "--binary", "--no-ext-diff")):
        found[DIFF] = hashlib.sha256(changes).hexdigest()
    found[IMAGE] = os.environ.get(IMAGE_DIGEST_VARIABLE, "")
    return {name: value for name, value in found.items() if value}


def _git(*arguments: str) -> bytes:
    """Return what git prints; nothing if there is no git, no repository or no commit."""
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return done.stdout if done.returncode == 0 else b""
