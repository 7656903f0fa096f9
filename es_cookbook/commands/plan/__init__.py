"""What a run needs of its GPUs, before anybody pays for them."""
