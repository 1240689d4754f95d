"""Check whether there is anything new to learn: the first step of retraining."""
