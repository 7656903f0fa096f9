"""What this machine has, how much of it a process may use, and how processes end."""
