"""Further terms of the objective: problems of their own, with a weight."""
