"""Per-example scores of the built-in tasks, and their models in MLflow."""
