"""Talk to a recorded run."""
