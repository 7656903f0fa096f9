"""Many engines as Ray actors."""
