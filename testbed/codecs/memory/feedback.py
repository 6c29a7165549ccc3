"""Error feedback: what a lossy codec left out of one message is added to a later one, whole, in part or with
momentum.
"""

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
    """Send C(X + decay * E), then set E to what of it the receiver does not decode. The payload is the inner codec's.

    There is one E for each (phase, micro-batch), from step to step. Only the sender remembers E; for a tensor of
    another shape than the last, E is 0.
    """

    unshared = "decoder"  # the sender's, which has no counterpart: the receiver decodes with the inner codec itself

    def __init__(self, context: Context, *, inner: Codec, decay: float = 1.0, **memories: Stateful) -> None:
        """Nothing in the context matters here: no number is drawn. `memories` are held beside E."""
        self._decay, self._scratch = decay, torch.empty(0)
        self._owed = Rows(dict[MicrobatchKey, _Owed])
        super().__init__(inner, owed=self._owed, **memories)

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """Encode the tensor and what is owed.

        CodecError names the message key where either, or the new error, is not finite.
        """
        return self._encode(header.check_input(tensor), key)[0]

    def _encode(self, x: Tensor, key: MessageKey) -> tuple[Payload, Tensor]:
        """Return the payload and what was to be sent with it, which is valid until the next call."""
        owed = self._of(key, x.shape)
        if owed is None:
            target = x.to(torch.float32)
        else:
            if self._scratch.shape != x.shape:
                self._scratch = torch.empty(x.shape)
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
        """Say whether an earlier error is still to be added."""
        return True

    def _of(self, key: MessageKey, shape: torch.Size) -> Tensor | None:
        owed = self._owed.rows.get(self._key(key))
        return owed.value if owed is not None and owed.value.shape == shape and self._lasts(owed, key) else None


class ErrorFeedback(Feedback):
    """Send C(X + E), then set E to X + E minus what the receiver decodes.

    The next step's micro-batch holds other examples, so one example's error is put into another's activations.

    Law: decoded + E = X + previous E, to fp32's rounding. Bits per value: the inner codec's.
    Source: Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019.
    """

    def residual(self, key: MessageKey) -> Tensor:
        """Return E after the last message, at the sender: what of the inputs has not crossed."""
        owed = self._owed.rows.get(self._key(key))
        return torch.zeros(()) if owed is None else owed.value.clone()


class DecayedFeedback(Feedback):
    """Error feedback that forgets: a share `decay` of what a message left out is added to the next.

    E is then a sum of inputs with weights that fall by `decay` per step, less what was sent: a momentum, from which
    what is sent is taken. Law: none. Bits per value: the inner codec's.
    Source: DeMo (Peng et al., arXiv 2411.19870), decay 0.999; SparseLoCo (Sarfi et al., arXiv 2508.15706), decay 0.95.
    """


class MomentumFeedback(Feedback):
    """Deep gradient compression's memory: momentum before error feedback, U = m U + X, V = V + U, and C(V) is sent.

    Where something is sent, U starts from 0 again (momentum factor masking), so that stale momentum does not push a
    value that has just been corrected. The published code sets V to 0 there; here V keeps what rounding left.

    Law: none; V holds what of the sum of all U has not crossed. Bits per value: the inner codec's. Two tensors are
    remembered for each (phase, micro-batch).
    Source: Lin et al., "Deep Gradient Compression", ICLR 2018.
    """

    def __init__(self, context: Context, *, inner: Codec, momentum: float = 0.9) -> None:
        """See `Feedback`."""
        self._momentum, self._velocity = momentum, Rows(dict[MicrobatchKey, _Velocity])
        super().__init__(context, inner=inner, velocity=self._velocity)

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """Encode V. CodecError as `Feedback.encode` raises it."""
        x = header.check_input(tensor).to(torch.float32)
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
    Source: Optimus-CC, Song et al., ASPLOS 2023 (arXiv 2301.09830), of which only the abstract was at hand. It
    compresses the sends that are exposed at the end of a schedule; this class compresses all of them.
    """

    def _key(self, key: MessageKey) -> MicrobatchKey:
        return key.phase, 0

    def _lasts(self, owed: _Owed, key: MessageKey) -> bool:
        return owed.step == key.step
