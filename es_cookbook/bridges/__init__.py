"""Environments of other libraries, played by a policy of this one."""
