"""Contract suites: published clients and testers against a served model."""
