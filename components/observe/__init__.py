"""Metrics, logs and alerts, all derived from a run's events."""
