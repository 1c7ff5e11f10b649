"""The HTTP routes, one module with an ``APIRouter`` for each API."""
