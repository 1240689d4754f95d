"""Write what a cross-validation found to its folder."""

from __future__ import annotations

from pathlib import Path

from steadytrain.components.tune.cross_validation.page import write_page
from steadytrain.components.tune.cross_validation.results import results_of, write_results
from steadytrain.components.tune.study import Study


def write_cross_validation(study: Study, folder: Path) -> None:
    """Write the results of a cross-validation, the predictions and the page."""
    results = results_of(study, folder)
    write_results(study, results, folder)
    write_page(study, results, folder)
