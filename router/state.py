"""The tables of what the routers of one host share besides files and batches."""

from __future__ import annotations

from .database import Schema

FILE = "router.sqlite3"
SCHEMA = Schema(
    1,
    """
CREATE TABLE responses (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    expires REAL NOT NULL,
    bytes INTEGER NOT NULL,
    status TEXT,
    seen REAL,
    cancelled INTEGER NOT NULL DEFAULT 0,
    body BLOB NOT NULL,
    items BLOB NOT NULL,
    earlier BLOB NOT NULL
);
CREATE INDEX response_sizes ON responses (number, bytes);
CREATE TABLE response_items (
    id TEXT NOT NULL,
    response INTEGER NOT NULL,
    PRIMARY KEY (id, response)
) WITHOUT ROWID;
CREATE INDEX items_of_response ON response_items (response);
""",
)
