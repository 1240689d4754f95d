"""A run's traces and metrics for a collector of OpenTelemetry, by OTLP over HTTP."""
