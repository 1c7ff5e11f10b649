"""The database schema of what the routers of one host share besides files and batches."""

from __future__ import annotations

import sqlite3

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
    size INTEGER NOT NULL,
    status TEXT,
    seen REAL,
    cancelled INTEGER NOT NULL DEFAULT 0,
    body BLOB NOT NULL,
    items BLOB NOT NULL,
    earlier BLOB NOT NULL
);
CREATE INDEX response_sizes ON responses (number, size);
CREATE TABLE response_items (
    id TEXT NOT NULL,
    response INTEGER NOT NULL,
    PRIMARY KEY (id, response)
) WITHOUT ROWID;
CREATE INDEX items_of_response ON response_items (response);
CREATE TABLE approvals (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    expires REAL NOT NULL,
    size INTEGER NOT NULL,
    state TEXT NOT NULL,
    label TEXT NOT NULL,
    name TEXT NOT NULL,
    arguments TEXT NOT NULL,
    outcome TEXT
);
CREATE INDEX approval_sizes ON approvals (number, size);
""",
)


def rows_to_evict(
    connection: sqlite3.Connection, table: str, *, max_rows: int, max_size: int, now: float
) -> list[int]:
    """The numbers of a table's oldest rows: those that have expired, and those over the limits.
    Rows expire in the order of their numbers, provided that all routers have the same lifetime."""
    count, size = connection.execute(
        f"SELECT count(*), coalesce(sum(size), 0) FROM {table}"
    ).fetchone()
    numbers = []
    for row in connection.execute(f"SELECT number, size, expires FROM {table} ORDER BY number"):
        if count <= max_rows and size <= max_size and row["expires"] > now:
            break
        numbers.append(row["number"])
        count, size = count - 1, size - row["size"]
    return numbers
