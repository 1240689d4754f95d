"""How ranks share a model's training: replicated, or with its state cut into shards."""
