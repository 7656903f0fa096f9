"""What genomes attempt: Envs, datasets, rewards and rollouts."""
