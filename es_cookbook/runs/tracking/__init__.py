"""Trackers: JSONL files and a live view in the terminal; reading what they wrote."""
