"""Rows of data files, of directories, and of sets of the Hub."""
