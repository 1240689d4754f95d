"""What varies by kind of task. Imported only where torch runs."""
