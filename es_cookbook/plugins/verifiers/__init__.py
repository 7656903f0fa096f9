"""Tasksets of the verifiers library (v1) as problems to train on."""
