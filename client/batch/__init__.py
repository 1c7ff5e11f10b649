"""`tandem run-batch`."""
