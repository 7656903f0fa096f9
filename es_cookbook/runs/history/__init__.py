"""The history: its format and its file."""
