"""What made the bundled models."""
