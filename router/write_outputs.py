"""Outputs of a request written as a stream, or collected for a response that is sent whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .generation import ChoiceDelta, Output, Outputs
from .http.long_events import Events, joined, written
from .http.slices import TimeSlices
from .surface import Response, StreamSink
from .telemetry.request_metrics import RequestMetrics


async def stream_outputs(
    sink: StreamSink, outputs: Outputs, metrics: RequestMetrics, response: Response
) -> None:
    """Write outputs as they arrive. The response's head waits for the first output, which comes
    once a node has admitted the request: until then an error can still have a status of its own."""
    async for arrived in outputs:
        if not sink.started:
            await sink.start_stream()
            await write_events(sink, response.opening())
        if len(arrived) == 1:
            await write_events(sink, _event(arrived[0], metrics, response))
        else:
            await write_events(sink, await _events(arrived, metrics, response))
    metrics.finish(sink.access.usage)
    closing = response.closing(sink.access.usage)
    await response.keep()
    await write_events(sink, closing)
    await sink.end_stream(response.end_of_stream())


async def write_events(sink: StreamSink, events: Events) -> None:
    """Write events, long ones piece by piece."""
    if isinstance(events, bytes):
        await sink.write(events)
        return
    async for piece in written(events):
        await sink.write(piece)


async def _events(outputs: Sequence[Output], metrics: RequestMetrics, response: Response) -> Events:
    """The events of outputs that arrived together. Many do not hold the event loop."""
    slices = TimeSlices()
    events: list[Events] = []
    for output in outputs:
        events.append(_event(output, metrics, response))
        await slices.checkpoint()
    return joined(events)


def _event(output: Output, metrics: RequestMetrics, response: Response) -> Events:
    metrics.count(output)
    return response.chunk(output) if isinstance(output, ChoiceDelta) else b""


async def collect_outputs(
    outputs: Outputs, metrics: RequestMetrics, add: Callable[[Output], None]
) -> None:
    """Collect all outputs. Many that arrive together do not hold the event loop."""
    async for arrived in outputs:
        slices = TimeSlices()
        for output in arrived:
            metrics.count(output)
            add(output)
            await slices.checkpoint()
