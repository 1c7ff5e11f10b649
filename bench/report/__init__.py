"""Results of benchmarks: figures, tables, files and plots."""
