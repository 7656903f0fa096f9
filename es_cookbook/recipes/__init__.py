"""The dishes: each folder an Env, its data and a command line."""
