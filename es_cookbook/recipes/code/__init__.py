"""Code: write Python that passes tests, which run in a sandbox."""
