"""Pairwise: answers are compared in pairs by a judge, and the reward is the share of wins."""
