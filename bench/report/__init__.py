"""Results: figures, tables, files and plots."""
