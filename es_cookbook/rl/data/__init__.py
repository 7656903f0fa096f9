"""Problems from files and Hub sets: checked rows, and batches of them."""
