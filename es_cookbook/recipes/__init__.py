"""Recipes: each folder is an Env, its data and a command line."""
