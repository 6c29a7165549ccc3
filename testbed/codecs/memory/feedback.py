"""Error feedback: what a lossy codec left out of one message is added to a later one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from testbed.codecs.contract import Codec, Context, MessageKey, Payload
from testbed.codecs.memory.history import MicrobatchKey
from testbed.codecs.wire import header
from testbed.codecs.wrap import Wrapper, check_keys, twin
from testbed.errors import CodecError


class _Owed(NamedTuple):
    step: int
    value: Tensor
    """E: fp32, the shape of the tensor."""


class ErrorFeedback(Wrapper):
    """Send C(X + E), then set E to X + E minus what the receiver decodes. The payload is the inner codec's.

    There is one E for each (phase, micro-batch), from step to step. The next step's micro-batch holds other examples,
    so one example's error is put into another's activations. Only the sender remembers E; for a tensor of another shape
    than the last, E is 0.

    Law: decoded + E = X + previous E, to fp32's rounding. Bits per value: the inner codec's.
    Source: Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019.
    """

    def __init__(self, context: Context, *, inner: Codec) -> None:
        """Nothing in the context matters here: no number is drawn."""
        self.inner, self._decoder = inner, twin(inner)
        super().__init__(inner=inner, decoder=self._decoder)
        self._owed: dict[MicrobatchKey, _Owed] = {}
        self._scratch = torch.empty(0)

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """Encode the tensor and what is owed.

        CodecError names the message key where either, or the new error, is not finite.
        """
        x = header.check_input(tensor)
        owed = self._of(key, x.shape)
        if owed is None:
            target = x.to(torch.float32)
        else:
            if self._scratch.shape != x.shape:
                self._scratch = torch.empty(x.shape)
            target = torch.add(owed, x, out=self._scratch)
        header.check_finite(target, key, "error feedback")
        with self.parts_unchanged_on_error():
            payload = self.inner.encode(target, key)
            left = torch.sub(target, decoded := self._decoder.decode(payload, key), out=decoded)
            header.check_finite(left, key, "error feedback")
        self._owed[self._key(key)] = _Owed(key.step, left)
        return payload

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """Decode with the inner codec."""
        return self.inner.decode(payload, key)

    def residual(self, key: MessageKey) -> Tensor:
        """Return E after the last message, at the sender: what of the inputs has not crossed."""
        owed = self._owed.get(self._key(key))
        return torch.zeros(()) if owed is None else owed.value.clone()

    def shared(self) -> Mapping[str, Tensor]:
        """Return what the inner codec shares.

        The sender's decoder has no counterpart: the receiver decodes with the inner codec itself.
        """
        return {key: value for key, value in super().shared().items() if not key.startswith("decoder.")}

    def state(self) -> dict[str, Any]:
        """Return every E, and the inner codec's state."""
        return {
            "parts": super().state(),
            "owed": [(*key, owed.step, owed.value.clone()) for key, owed in self._owed.items()],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned. CodecError for anything else."""
        check_keys(state, {"parts", "owed"})
        loaded: dict[MicrobatchKey, _Owed] = {}
        for row in state["owed"]:
            match row:
                case ("train" | "evaluation" as phase, int(part), int(step), Tensor() as value) if (
                    value.dtype == torch.float32
                ):
                    loaded[phase, part] = _Owed(step, value.clone())
                case _:
                    raise CodecError("cannot load a state: a row is not (phase, micro-batch, step, fp32 tensor)")
        super().load(state["parts"])
        self._owed = loaded

    def reset(self) -> None:
        """Owe nothing any more."""
        super().reset()
        self._owed = {}

    def _key(self, key: MessageKey) -> MicrobatchKey:
        return key.phase, key.microbatch

    def _lasts(self, owed: _Owed, key: MessageKey) -> bool:
        """Say whether an earlier error is still to be added."""
        return True

    def _of(self, key: MessageKey, shape: torch.Size) -> Tensor | None:
        owed = self._owed.get(self._key(key))
        return owed.value if owed is not None and owed.value.shape == shape and self._lasts(owed, key) else None


class LazyErrorFeedback(ErrorFeedback):
    """Lazy error propagation: one E per phase, passed from micro-batch to micro-batch and dropped at a step's end.

    It is for gradients, as in `fwd=bf16, bwd=lazy(powersgd(4))`: the optimiser sees the sum over a step's
    micro-batches, so only the last one's error is lost.

    Law within a step: the sum of what is decoded + E = the sum of the inputs. Bits per value: the inner codec's.
    Source: Optimus-CC, Song et al., ASPLOS 2023 (arXiv 2301.09830), of which only the abstract was at hand. It
    compresses the sends that are exposed at the end of a schedule; this class compresses all of them.
    """

    def _key(self, key: MessageKey) -> MicrobatchKey:
        return key.phase, 0

    def _lasts(self, owed: _Owed, key: MessageKey) -> bool:
        return owed.step == key.step
