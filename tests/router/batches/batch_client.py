"""A router with a folder for batches, and OpenAI's client for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import openai

from tandem.router.batches.rows import UNFINISHED
from tandem.tests.router.support import Cluster, cluster

CHAT: Literal["/v1/chat/completions"] = "/v1/chat/completions"
EMBEDDINGS, RESPONSES = "/v1/embeddings", "/v1/responses"
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


def line(number: int, url: str = CHAT, **body: Any) -> dict[str, Any]:
    return {"custom_id": f"r{number}", "method": "POST", "url": url, "body": HI | body}


def jsonl(*lines: Any) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


def parsed(text: str) -> list[Any]:
    return [json.loads(one) for one in text.splitlines()]


@asynccontextmanager
async def served(
    tmp_path: Path, **options: Any
) -> AsyncIterator[tuple[Cluster, openai.AsyncOpenAI]]:
    async with cluster(tmp_path, batch_dir=str(tmp_path / "batches"), **options) as c:
        key = options.get("api_key", "x").split(",")[0]
        async with openai.AsyncOpenAI(base_url=c.url + "/v1", api_key=key, max_retries=0) as client:
            yield c, client


async def create(client: openai.AsyncOpenAI, content: bytes, **fields: Any) -> Any:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    params: Any = {"endpoint": CHAT, "completion_window": "24h"} | fields
    return await client.batches.create(input_file_id=file.id, **params)


async def ended(client: openai.AsyncOpenAI, batch: Any) -> Any:
    async with asyncio.timeout(20):
        while batch.status in UNFINISHED:
            await asyncio.sleep(0.01)
            batch = await client.batches.retrieve(batch.id)
    return batch
