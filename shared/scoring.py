"""How models that are not for chats score texts, and the router's routes for them."""

from __future__ import annotations

from typing import Literal

# As a pair by a classifier with one label, or by the angle between embedding vectors. A classifier
# with several "labels" does not score pairs.
Scoring = Literal["pair", "labels", "vectors"]
ROUTES: dict[str, str] = {
    "pair": "/v1/rerank",
    "labels": "/classify",
    "vectors": "/v1/embeddings",
}
