"""Pipelines on a Kubeflow server: upload, run, follow, schedule. Needs no torch."""
