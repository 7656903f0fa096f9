"""Games of TextArena as Envs."""
