"""What fits on a machine and how a run starts there: micro-batch, strategy, recipe."""
