"""Metrics, alerts and dashboards, all derived from a run's events."""
