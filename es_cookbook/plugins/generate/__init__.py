"""Training rows and second answers from models."""
