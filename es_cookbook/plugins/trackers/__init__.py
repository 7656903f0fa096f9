"""Trackers of other libraries: TensorBoard, trackio, wandb."""
