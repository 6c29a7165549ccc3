"""Chooses the mildest of three codecs that fits into a time limit on the link, as measured at the boundary.

All boundaries have the same time limit per message, so the slowest link compresses most. (FusionLLM, arXiv 2410.12707,
makes each link's ratio proportional to its slowness; the three steps and the time limit are ours.) The sender measures
its link from acknowledgements (`runtime/carried.py`), and never reads the link's profile. The payload contains the
choice, so the receiver measures nothing.

Only with this codec do results depend on the network: two runs may choose differently, so a run is only as reproducible
as its link.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from testbed.codecs.contract import Codec, Context, MessageKey, ObservesLink, Payload
from testbed.codecs.wrap import Wrapper, check_keys, frame, open_frame, parts_with
from testbed.errors import CodecError

_MEMORY = 0.5
"""Weight of earlier bytes and seconds in the rate, which follows a change of the link within a few messages."""
_LEAST_BYTES = 4096
"""With fewer bytes since the last message, the time reflects the delay rather than the rate."""


class Adaptive(Wrapper):
    """Wire: 4 bytes (code, index of the codec, 0, 0), then that codec's payload.

    The first message goes through `mild`. Later ones go through the mildest codec whose payload fits into `within_ms`
    at the mean rate, estimated from its last bytes per element; an unused codec is tried if no milder one fits. Law:
    the chosen codec's. State: those of the three codecs, and at the sender the rate and the bytes per element of each.
    """

    code = 68

    def __init__(self, context: Context, within_ms: float, mild: Codec, middle: Codec, strong: Codec) -> None:
        """`within_ms` is in the machine's own time, so dilation affects it like everything else."""
        super().__init__(mild=mild, middle=middle, strong=strong)
        self._observers = parts_with(self.parts, ObservesLink)
        self._within_s = within_ms * 1e-3
        self._codecs = (mild, middle, strong)
        self._bytes: list[float | None] = [None] * len(self._codecs)
        """Bytes per element of each codec's last payload."""
        self._carried = self._seconds = 0.0
        """Bytes that the link carried, and the time for which it was busy; older messages have less weight."""
        self._chosen: int | None = None

    @property
    def choice(self) -> str | None:
        """The parameter whose codec made the last payload."""
        return None if self._chosen is None else ("mild", "middle", "strong")[self._chosen]

    def observe(self, sent_bytes: int, seconds: float) -> None:
        """Update the link's rate; pass it on to inner codecs that observe it."""
        for part in self._observers.values():
            part.observe(sent_bytes, seconds)
        if sent_bytes >= _LEAST_BYTES:
            self._carried = _MEMORY * self._carried + sent_bytes
            self._seconds = _MEMORY * self._seconds + seconds

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """Choose a codec, and encode with it."""
        choice = self._choose(tensor.numel())
        payload = self._codecs[choice].encode(tensor, key)
        self._chosen = choice
        if tensor.numel():
            self._bytes[choice] = len(memoryview(payload).cast("B")) / tensor.numel()
        return frame(self.code, payload, kind=choice)

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """Decode with the codec that the other end chose."""
        choice, visit, body = open_frame(payload, self.code)
        if choice >= len(self._codecs) or visit:
            raise CodecError(f"cannot decode {key}: codec {choice} of {len(self._codecs)} with visit number {visit}")
        return self._codecs[choice].decode(body, key)

    def state(self) -> dict[str, Any]:
        """Return the states of the three codecs, and the state of the choice."""
        return {"parts": super().state(), "bytes": list(self._bytes), "link": [self._carried, self._seconds]}

    def load(self, state: Any) -> None:
        """Load what `state` returned; CodecError for anything else."""
        check_keys(state, {"parts", "bytes", "link"})
        match state["bytes"], state["link"]:
            case [_, _, _] as sizes, [float(carried), float(seconds)] if all(
                size is None or isinstance(size, float) for size in sizes
            ):
                super().load(state["parts"])
                self._bytes, self._carried, self._seconds = list(sizes), carried, seconds
            case _:
                raise CodecError("cannot load a state: expected bytes per element of three codecs, bytes and seconds")

    def _choose(self, elements: int) -> int:
        if not self._carried:
            return 0
        for choice, per_element in enumerate(self._bytes):
            if per_element is None or per_element * elements * self._seconds <= self._within_s * self._carried:
                return choice
        return len(self._codecs) - 1
