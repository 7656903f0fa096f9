"""Where grading runs that would hold up the event loop: worker processes."""
