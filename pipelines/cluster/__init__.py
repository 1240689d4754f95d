"""What a cluster offers a run, and what stands in its way."""
