"""The centre of a run again: replayed, kept in snapshots, and read by others."""
