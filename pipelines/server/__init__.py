"""Pipelines on a Kubeflow server: uploaded, run, followed, scheduled. Needs no torch."""
