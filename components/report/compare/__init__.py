"""Several runs side by side, and whether one of two models is better."""
