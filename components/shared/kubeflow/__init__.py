"""Access to a Kubeflow Pipelines server."""
