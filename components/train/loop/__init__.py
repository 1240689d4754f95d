"""What runs on each rank. Imported only where torch runs."""
