"""What every room uses: configs, the command line, errors, seeds, cores."""
