"""Runs beside each other, in tables and plots."""
