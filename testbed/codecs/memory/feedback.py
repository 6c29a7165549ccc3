"""Error feedback: the error of one message is added to a later one, in full, in part or with momentum."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from testbed.codecs.contract import Codec, Context, MessageKey, Payload, Stateful
from testbed.codecs.remembered import Fp32, MicrobatchKey, Rows
from testbed.codecs.wire import header
from testbed.codecs.wrap import ClosedLoop


class _Owed(NamedTuple):
    step: int
    value: Fp32
    """E: the shape of the tensor."""


class _Velocity(NamedTuple):
    value: Fp32
    """U: the shape of the tensor."""


class Feedback(ClosedLoop):
    """Send C(X + decay * E), then set E to the part that the receiver does not decode. Payload: the inner codec's.

    There is one E per (phase, micro-batch), kept from step to step, at the sender only. If a tensor's shape differs
    from the last one's, E is 0.
    """

    on_device = True
    unshared = "decoder"  # the sender's, which has no counterpart: the receiver decodes with the inner codec itself

    def __init__(self, context: Context, *, inner: Codec, decay: float = 1.0, **memories: Stateful) -> None:
        """The context has no effect: no random numbers are drawn. `memories` are kept in addition to E."""
        self._decay, self._scratch = decay, torch.empty(0)
        self._owed = Rows(dict[MicrobatchKey, _Owed])
        super().__init__(inner, owed=self._owed, **memories)

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """Encode the tensor plus E.

        CodecError names the message key if either, or the new E, is not finite.
        """
        return self._encode(header.check_input(tensor, on_device=True), key)[0]

    def _encode(self, x: Tensor, key: MessageKey) -> tuple[Payload, Tensor]:
        """Return the payload and the tensor that it encodes, which is valid until the next call."""
        owed = self._of(key, x.shape)
        if owed is None:
            target = x.to(torch.float32)
        else:
            if self._scratch.shape != x.shape or self._scratch.device != x.device:
                self._scratch = torch.empty(x.shape, device=x.device)
            target = torch.add(x, owed, alpha=self._decay, out=self._scratch)
        header.check_finite(target, key, "error feedback")
        with self.parts_unchanged_on_error():
            payload = self.inner.encode(target, key)
            left = torch.sub(target, decoded := self._decoder.decode(payload, key), out=decoded)
            header.check_finite(left, key, "error feedback")
        self._owed.rows[self._key(key)] = _Owed(key.step, left)
        return payload, target

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """Decode with the inner codec."""
        return self.inner.decode(payload, key)

    def _key(self, key: MessageKey) -> MicrobatchKey:
        return key.phase, key.microbatch

    def _lasts(self, owed: _Owed, key: MessageKey) -> bool:
        """Return whether an earlier error applies to this message."""
        return True

    def _of(self, key: MessageKey, shape: torch.Size) -> Tensor | None:
        owed = self._owed.rows.get(self._key(key))
        return owed.value if owed is not None and owed.value.shape == shape and self._lasts(owed, key) else None


class ErrorFeedback(Feedback):
    """Send C(X + E), then set E to X + E minus what the receiver decodes.

    The next step's micro-batch holds other examples, so one example's error enters another's activations.

    Law: decoded + E = X + previous E, up to fp32's rounding. Bits per value: the inner codec's.
    Source: Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019.
    """

    def residual(self, key: MessageKey) -> Tensor:
        """Return the sender's E after the last message: the part of its inputs that the receiver has not decoded."""
        owed = self._owed.rows.get(self._key(key))
        return torch.zeros(()) if owed is None else owed.value.clone()


class DecayedFeedback(Feedback):
    """Error feedback with decay: E is multiplied by `decay` before it is added to the next message.

    E is then a sum of inputs with weights that fall by `decay` per step, minus the decoded values: a momentum from
    which sent values are subtracted. Law: none. Bits per value: the inner codec's.
    Source: DeMo (Peng et al., arXiv 2411.19870), decay 0.999; SparseLoCo (Sarfi et al., arXiv 2508.15706), decay 0.95.
    """


class MomentumFeedback(Feedback):
    """Deep gradient compression: momentum before error feedback. U = m U + X, V = V + U, and C(V) is sent.

    Where a value is sent, U is reset to 0 (momentum factor masking), so that stale momentum does not push a value that
    has just been corrected. The published code also sets V to 0 there; here V keeps the rounding error.

    Law: none; V holds the part of the sum of all U that has not been decoded. Bits per value: the inner codec's. State:
    two tensors per (phase, micro-batch).
    Source: Lin et al., "Deep Gradient Compression", ICLR 2018.
    """

    def __init__(self, context: Context, *, inner: Codec, momentum: float = 0.9) -> None:
        """See `Feedback`."""
        self._momentum, self._velocity = momentum, Rows(dict[MicrobatchKey, _Velocity])
        super().__init__(context, inner=inner, velocity=self._velocity)

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """Encode V. CodecError as in `Feedback.encode`."""
        x = header.check_input(tensor, on_device=True).to(torch.float32)
        velocity, last = x.clone(), self._velocity.rows.get(self._key(key))
        if last is not None and last.value.shape == x.shape:
            velocity.add_(last.value, alpha=self._momentum)
        payload, target = self._encode(velocity, key)
        velocity[target != self._owed.rows[self._key(key)].value] = 0.0
        self._velocity.rows[self._key(key)] = _Velocity(velocity)
        return payload


class LazyErrorFeedback(ErrorFeedback):
    """Lazy error propagation: one E per phase, passed from micro-batch to micro-batch and dropped at a step's end.

    It is for gradients, as in `fwd=bf16, bwd=lazy(powersgd(4))`: the optimiser sees the sum over a step's
    micro-batches, so only the last one's error is lost.

    Law within a step: the sum of what is decoded + E = the sum of the inputs. Bits per value: the inner codec's.
    Source: Optimus-CC, Song et al., ASPLOS 2023 (arXiv 2301.09830), of which we read only the abstract. It
    compresses the sends that are exposed at the end of a schedule; this class compresses all of them.
    """

    def _key(self, key: MessageKey) -> MicrobatchKey:
        return key.phase, 0

    def _lasts(self, owed: _Owed, key: MessageKey) -> bool:
        return owed.step == key.step
