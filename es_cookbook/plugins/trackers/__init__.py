"""Trackers that log to other libraries: TensorBoard, Trackio, W&B."""
