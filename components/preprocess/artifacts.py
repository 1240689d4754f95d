"""Pass a pipeline's parameters to the preprocess step, and its record to KFP artifacts."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

from kfp import dsl

from steadytrain.components.preprocess.step import run
from steadytrain.components.shared.config import from_parameters
from steadytrain.components.shared.kubeflow.connection import run_tags
from steadytrain.components.shared.stage import start_run
from steadytrain.components.shared.tracking import run_links
from steadytrain.components.train.recovery.takeover import hold_run


def preprocess(
    *,
    parameters: Mapping[str, Any],
    resolved: dsl.Artifact,
    data: dsl.Dataset,
    data_card: dsl.HTML,
    counts: dsl.Metrics,
) -> None:
    """Run the step. Small artifacts describe the result, which stays in the workspace."""
    config = from_parameters(**parameters)
    # Hold the run, so that it does not restart while another process trains it.
    with hold_run(config):
        workspace = start_run(config, run_tags(str(parameters["job"])))
    shutil.copyfile(workspace.config, resolved.path)
    resolved.metadata.update(
        run=config.run_id, digest=config.digest(), **run_links(config, workspace)
    )

    record = run(config)
    shutil.copyfile(workspace.record("preprocess"), data.path)
    shutil.copyfile(record.path("card.html"), data_card.path)
    data.metadata.update(fingerprint=record.fingerprint, folder=record.folder)
    for side, content in record.sides.items():
        counts.log_metric(f"{side}_documents", content.documents)
        counts.log_metric(f"{side}_sequences", content.rows)
        counts.log_metric(f"{side}_tokens", content.tokens)
