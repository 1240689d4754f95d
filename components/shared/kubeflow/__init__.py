"""Speaking to a Kubeflow Pipelines server."""
