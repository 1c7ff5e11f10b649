"""`tandem bench`: measures servers over HTTP, and the engine in this process.

Commands that only talk to a URL import neither torch nor the engine.
"""
