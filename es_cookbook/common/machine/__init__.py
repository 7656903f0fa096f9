"""What this machine has, and how much of it a process may use."""
