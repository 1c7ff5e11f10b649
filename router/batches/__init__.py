"""Files and batches: requests in a file that are served in the background."""
