"""Where people find a run of Kubeflow Pipelines, for the tracking of what it trains."""

from __future__ import annotations

import os

from steadytrain.components.shared.cluster import own_pod_name
from steadytrain.components.shared.kubeflow.connection import UI_VARIABLE, page


def run_tags(job: str) -> dict[str, str]:
    """Tags of the MLflow run: KFP's id of its run, and its page where the UI's address is known.

    Without any outside of a pipeline on a cluster.
    """
    if not (job and own_pod_name()):
        return {}
    tags, ui = {"kubeflow.run_id": job}, os.environ.get(UI_VARIABLE, "")
    return tags | {"kubeflow.run_url": page(ui, "runs", job)} if ui else tags
