"""Report runs to MLflow: one MLflow run per pipeline run, one child run per attempt."""

from steadytrain.components.shared.tracking.connect import (
    check_tracking,
    import_mlflow,
    resolve_uri,
    use_tracking,
)
from steadytrain.components.shared.tracking.finish import finish_run
from steadytrain.components.shared.tracking.mlflow_sink import MlflowSink
from steadytrain.components.shared.tracking.run import (
    parent_run,
    read_version,
    run_links,
    version_link,
)

__all__ = [
    "MlflowSink",
    "check_tracking",
    "finish_run",
    "import_mlflow",
    "parent_run",
    "read_version",
    "resolve_uri",
    "run_links",
    "use_tracking",
    "version_link",
]
