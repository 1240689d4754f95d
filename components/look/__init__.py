"""Is there anything new to learn? The first step of retraining."""
