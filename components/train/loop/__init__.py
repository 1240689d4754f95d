"""The code that runs on each rank. Import it only where torch is available."""
