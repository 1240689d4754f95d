"""What a cluster offers to a run, and what would prevent a run there."""
