"""Zeroth-order methods on losses, MeZO and those after it: two optimizers, a space and presets."""
