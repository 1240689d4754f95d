"""The steps of a training pipeline, and what they share."""
