"""What made the bundled rows."""
