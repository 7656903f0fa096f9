"""Programs that made the bundled rows."""
