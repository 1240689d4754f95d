"""Authoring and running pipelines: what to run. Never imports torch."""
