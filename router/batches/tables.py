"""The database schema of files and batches."""

from __future__ import annotations

from ..database import Schema

SCHEMA = Schema(
    1,
    """
CREATE TABLE files (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    purpose TEXT NOT NULL,
    filename TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER,
    complete INTEGER NOT NULL,
    batch TEXT,
    succeeded INTEGER
);
CREATE TABLE pieces (
    file TEXT NOT NULL,
    number INTEGER NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (file, number)
);
CREATE TABLE batches (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    status TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    input_file_id TEXT NOT NULL,
    completion_window TEXT NOT NULL,
    metadata TEXT NOT NULL,
    errors TEXT NOT NULL,
    model TEXT,
    output_file_id TEXT,
    error_file_id TEXT,
    output_seconds INTEGER,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    in_progress_at INTEGER,
    finalizing_at INTEGER,
    completed_at INTEGER,
    failed_at INTEGER,
    expired_at INTEGER,
    cancelling_at INTEGER,
    cancelled_at INTEGER,
    total INTEGER NOT NULL DEFAULT 0,
    completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0,
    input_tokens INTEGER NOT NULL DEFAULT 0,
    cached_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0,
    reasoning_tokens INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE requests (
    batch TEXT NOT NULL,
    line INTEGER NOT NULL,
    custom_id TEXT NOT NULL,
    body BLOB,
    succeeded INTEGER,
    result BLOB,
    PRIMARY KEY (batch, line)
);
CREATE UNIQUE INDEX custom_ids ON requests (batch, custom_id);
CREATE INDEX results ON requests (batch, succeeded, line);
""",
)
