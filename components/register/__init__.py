"""Versions and aliases in the MLflow registry."""
