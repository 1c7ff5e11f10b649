"""Logs, traces, and the metrics that several parts share."""
