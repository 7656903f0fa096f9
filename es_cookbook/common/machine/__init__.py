"""This machine's resources, a process's share of them, and how processes end."""
