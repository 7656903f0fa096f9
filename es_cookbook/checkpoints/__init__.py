"""Files that hold weights: models, tensors, snapshots, quantised checkpoints."""
