"""HTTP without any API: exchanges with size and time limits, JSON, deadlines."""
