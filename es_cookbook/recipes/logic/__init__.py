"""Problems of reasoning-gym's generators, by name and by difficulty."""
