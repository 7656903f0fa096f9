"""What is here to be run, and not to be imported."""

collect_ignore = ["rebuild.py"]
