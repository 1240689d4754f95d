"""How the global batch is divided."""
