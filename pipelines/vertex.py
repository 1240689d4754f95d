"""What of a compiled pipeline does not run on Vertex AI Pipelines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from steadytrain.pipelines.compile import Finding

_REGISTRIES: Final = re.compile(r"([a-z0-9-]+-docker\.pkg\.dev|([a-z]+\.)?gcr\.io)/")
"""Artifact Registry, and its names of Container Registry."""
_WITHOUT: Final = {
    "pvcMount": (
        "mounts a volume, which Vertex does not have: it has folders of Cloud Storage under /gcs",
        "set output to a folder of a bucket, such as /gcs/BUCKET/steadytrain",
    ),
    "secretAsEnv": (
        "reads a Kubernetes Secret, which Vertex does not have",
        "read Secret Manager in the image's entry point, or use the service account's own rights",
    ),
    "secretAsVolume": (
        "mounts a Kubernetes Secret, which Vertex does not have",
        "read Secret Manager in the image's entry point",
    ),
    "nodeSelector": (
        "selects nodes, of which Vertex has none",
        "set_accelerator_type and set_accelerator_limit select a machine there",
    ),
}
_HARMLESS: Final = {"podMetadata", "imagePullPolicy"}


def lint_vertex(spec: Mapping[str, Any], platform: Mapping[str, Any]) -> list[Finding]:
    """Return what of a compiled pipeline Vertex AI Pipelines rejects or ignores.

    The SDK of Vertex reads files with one YAML document (kubeflow/pipelines issue 11241), and
    Vertex runs the tasks on machines of its own, without a cluster's objects.

    Args:
        spec, platform: as of `read_pipeline`.
    """
    found = list(_images(spec))
    kubernetes = platform.get("platforms", {}).get("kubernetes", {})
    if not kubernetes:
        return found
    found.append(
        Finding(
            "the file",
            "has a second document, platforms.kubernetes, and Vertex's SDK reads files with one",
            "give it the first document only, after the findings below are resolved",
        )
    )
    executors = kubernetes.get("deploymentSpec", {}).get("executors", {})
    for label, fields in sorted(executors.items()):
        for name in sorted(fields.keys() - _HARMLESS):
            text, fix = _WITHOUT.get(
                name, (f"sets {name}, which Vertex ignores", "leave it out, or do not rely on it")
            )
            found.append(Finding(f"executor {label}", text, fix, unsafe=name in _WITHOUT))
    return found


def _images(spec: Mapping[str, Any]) -> Iterator[Finding]:
    executors = spec.get("deploymentSpec", {}).get("executors", {})
    images = {str(item.get("container", {}).get("image", "")) for item in executors.values()}
    for image in sorted(images - {""}):
        if not image.startswith("{{") and not _REGISTRIES.match(image):
            yield Finding(
                f"image {image}",
                "is not in Artifact Registry, from which Vertex pulls",
                "push it there, and set STEADYTRAIN_REGISTRY=REGION-docker.pkg.dev/PROJECT/NAME",
            )
