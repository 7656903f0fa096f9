"""The commands of reports, plots and tables."""
