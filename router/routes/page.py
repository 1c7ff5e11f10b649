"""The web page: a chat, and the state of the cluster.

Its files contain no data, so they need no key. The page asks the user for one to fetch data.
"""

from __future__ import annotations

from fastapi import APIRouter, Response
from fastapi.responses import HTMLResponse

from ..errors import ApiError
from ..http.exchange import HttpExchange
from ..openai.response_models import OpenAIError
from ..web.overview import ClusterOverview
from ..web.page_files import HEADERS, INDEX, PageFile, page_files
from .documentation import documented_errors
from .guards import HOST_CHECKED, KEY_CHECKED
from .services import Exchange, RouterServices

router = APIRouter(tags=["page"], responses=documented_errors(OpenAIError))


@router.get("/", response_class=HTMLResponse, dependencies=HOST_CHECKED)
@router.get("/cluster", response_class=HTMLResponse, dependencies=HOST_CHECKED)
async def show_page(exchange: Exchange) -> Response:
    """A web page to chat with the model and to watch the cluster."""
    return _file_response(exchange, page_files()[INDEX])


@router.get("/cluster/state", dependencies=KEY_CHECKED)
async def show_cluster(services: RouterServices) -> ClusterOverview:
    """The nodes, and the prompts whose KV moves, as this router sees them. Both lists are
    limited."""
    return services.overview.now()


@router.get("/web/{path:path}", include_in_schema=False, dependencies=HOST_CHECKED)
async def show_file(exchange: Exchange, path: str) -> Response:
    """A file of the page."""
    file = page_files().get(path)
    if file is None:
        raise ApiError(404, f"The page has no file '{path[:200]}'.", code="unknown_url")
    return _file_response(exchange, file)


def _file_response(exchange: HttpExchange, file: PageFile) -> Response:
    headers = HEADERS | {"etag": file.tag}
    if exchange.header(b"if-none-match").decode("latin-1") == file.tag:
        return Response(status_code=304, headers=headers)
    if b"gzip" in exchange.header(b"accept-encoding"):
        headers |= {"content-encoding": "gzip"}
        return Response(file.compressed, headers=headers, media_type=file.kind)
    return Response(file.content, headers=headers, media_type=file.kind)
