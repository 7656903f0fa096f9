"""Conciseness: answers as short as the shortest good one."""
