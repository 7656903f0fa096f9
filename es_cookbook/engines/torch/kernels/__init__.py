"""Loops over rows that torch has no operation for, compiled for the CPU by numba."""
