"""Train on which answers a judge prefers."""
