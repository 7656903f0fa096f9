"""Commands that train by gradients or compare gradients with evolution strategies."""
