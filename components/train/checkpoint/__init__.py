"""Saving and restoring all state that exact resume needs."""
