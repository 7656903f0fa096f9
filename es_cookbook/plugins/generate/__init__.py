"""Training rows from models."""
