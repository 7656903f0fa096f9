"""Lists and summaries of runs and plug-ins."""
