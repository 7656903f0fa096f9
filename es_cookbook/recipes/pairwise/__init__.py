"""Train on which answers a judge prefers.

Win rates by a judge in place of rewards.
"""
