"""Files and batches: requests in a file that are answered in the background."""
