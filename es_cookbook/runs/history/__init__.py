"""The history: its format, its file, and what becomes of it when a run branches."""
