"""The manifests as kustomize builds them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

MANIFESTS = Path(__file__).resolve().parents[2] / "manifests"
OVERLAYS = sorted(path.name for path in (MANIFESTS / "overlays").iterdir())
OF_THE_CLUSTER = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
"""Kinds without a namespace."""
COMPONENTS = sorted(path.name for path in (MANIFESTS / "components").iterdir())


def build(overlay: str, components: Sequence[str], scratch: Path, **fields: Any) -> list[Any]:
    """Build an overlay with additional components enabled, as a user does; return its objects.

    Args:
        fields: replacements for fields of the overlay's kustomization.
    """
    copy = scratch / "manifests"
    if not copy.exists():
        shutil.copytree(MANIFESTS, copy)
    file = copy / "overlays" / overlay / "kustomization.yaml"
    content = yaml.safe_load((MANIFESTS / "overlays" / overlay / file.name).read_text())
    switched_on = [f"../../components/{name}" for name in components]
    content["components"] = [*dict.fromkeys([*content.get("components", []), *switched_on])]
    file.write_text(yaml.safe_dump({**content, **fields}))
    done = subprocess.run(["kubectl", "kustomize", file.parent], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def pods(objects: Sequence[Any]) -> Iterator[Any]:
    """Yield the pod templates among the objects."""
    for item in objects:
        template = item.get("spec", {}).get("template")
        if template is not None:
            yield template["spec"]
