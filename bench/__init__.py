"""`tandem bench`: measurements of servers over HTTP. They import neither torch nor the engine."""
