"""Moves the messages of a live place between its GPU and its connections, while it computes.

A payload that leaves is copied to pinned memory on a stream of its own, which the send thread waits for. One that
arrives is received in pinned memory, and the receive thread copies it up on another stream before the place sees it.
The place waits for its own stream after each action, so that recorded times are those of the work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from testbed.codecs.wire.header import CPU, ArrivedPayload, DevicePayload
from testbed.runtime.transport import Copies, Payload


class DeviceCopies(Copies):
    """Copies from and to a device, for all connections of a place."""

    def __init__(self, device: torch.device, streams: Any = torch.cuda) -> None:
        """`streams`: torch's module with the streams and events of such devices."""
        self._device, self._streams = device, streams
        self._out, self._in = streams.Stream(device), streams.Stream(device)

    def leave(self, payload: Any) -> tuple[Payload, Callable[[], None]]:
        """Start to copy a payload that is on the device; the bytes of a codec that works on the CPU are there."""
        if not isinstance(payload, DevicePayload):
            return super().leave(payload)
        memory, start = self._pinned(len(payload)), len(payload.head)
        self._out.wait_stream(self._streams.current_stream(self._device))
        with self._streams.stream(self._out):
            memory[start:].copy_(payload.body, non_blocking=True)
        copied, view = self._event(self._out), memory.numpy().data
        view[:start] = payload.head

        def ready(source: Tensor = payload.body) -> None:  # whose memory is not used again before
            copied.synchronize()

        return view, ready

    def room(self, size_bytes: int) -> memoryview:
        """Return pinned memory."""
        return self._pinned(size_bytes).numpy().data

    def arrived(self, payload: memoryview) -> Any:
        """Copy a payload to the device, and wait for that. A place that lets go of it has waited for what reads it."""
        if not payload.nbytes:
            return payload
        host = torch.frombuffer(bytearray(payload) if payload.readonly else payload, dtype=torch.uint8)
        with self._streams.stream(self._in):
            there = host.to(self._device, non_blocking=True)
        self._event(self._in).synchronize()
        return ArrivedPayload(payload, there)

    def computed(self) -> None:
        """Wait until all that the calling thread computes is computed."""
        self._event(self._streams.current_stream(self._device)).synchronize()

    def _event(self, stream: Any) -> Any:
        event = self._streams.Event(blocking=True)  # other places compute meanwhile on this core
        event.record(stream)
        return event

    def _pinned(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")


def copies_of(device: torch.device) -> Copies:
    """Return the copies of a place that computes on a device: none on the CPU."""
    return Copies() if device.type == CPU.type else DeviceCopies(device)
