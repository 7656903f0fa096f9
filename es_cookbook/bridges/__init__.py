"""Other people's environments and evaluations, played by a policy of ours."""
