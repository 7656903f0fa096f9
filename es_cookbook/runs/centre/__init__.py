"""The centre of any generation of a run: replay and snapshots."""
