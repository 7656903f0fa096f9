"""Programs that made the bundled models."""
