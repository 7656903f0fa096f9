"""Group relative policy optimisation by TRL's `GRPOTrainer`, on the same problems and Envs."""
