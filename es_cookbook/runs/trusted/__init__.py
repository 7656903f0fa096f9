"""Whose word a run is: the seal of this user, and the scripts that a Config names."""
