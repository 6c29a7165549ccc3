"""A stranger's codec that keeps every rule, and others that each break one: the kit must find each of them out."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from testbed.codecs.contract import Context, MessageKey, Payload
from testbed.codecs.wire import header
from testbed.errors import CodecError

CODE = 200


class Good:
    """fp32 as it is."""

    law = "identity"

    def __init__(self, context: Context) -> None:
        self.context = context

    def payload_bytes(self, shape: tuple[int, ...]) -> int:
        return header.header_bytes(len(shape)) + 4 * math.prod(shape)

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        x = header.check_input(tensor)
        payload, body = header.allocate(CODE, tuple(x.shape), 4 * x.numel())
        if x.numel():
            body.view(torch.float32).copy_(x.reshape(-1))
        return payload

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        opened = header.open_payload(payload, CODE, lambda shape: 4 * math.prod(shape))
        return header.as_tensor(opened.body, torch.float32, opened.elements).clone().view(opened.shape)


def sending(change: Callable[[Tensor, MessageKey], Tensor], law: str = "identity") -> type[Good]:
    """A codec that sends what `change` makes of the tensor, and says that it keeps the law."""

    class Sending(Good):
        def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
            return super().encode(change(header.check_input(tensor).float(), key), key)

    Sending.law = law
    return Sending


def _rounded_down(x: Tensor, key: MessageKey) -> Tensor:
    return (x + 0.9 * torch.rand(x.shape, generator=torch.Generator().manual_seed(key.step))).floor()


LosesOnlyLater = sending(lambda x, key: x if key.step == 0 else torch.where(torch.isfinite(x), 0.0, x))
LosesTheSignOfZero = sending(lambda x, _: x + 0.0)
ChangesItsInput = sending(lambda x, _: x.clamp_(-1, 1))
SwallowsNan = sending(lambda x, _: x.nan_to_num())
# It goes by how the values lie in memory and not by where they stand in the tensor.
ReadsMemoryInItsOrder = sending(lambda x, _: x if x.is_contiguous() else x.flip(-1), law="none")
DrawsFromTheGlobalGenerator = sending(lambda x, _: x + torch.rand(x.shape), law="none")
RoundsDown = sending(_rounded_down, law="unbiased")
KeepsHalf = sending(lambda x, _: x / 2, law="support")
OwesMoreAndMore = sending(lambda x, _: x * 0.9, law="residual")
NoProjection = sending(lambda x, _: x * 0.5, law="projection")
ProjectsToNothing = sending(lambda x, _: torch.zeros_like(x), law="projection")


class HidesTheTensor(Good):
    """Sends zeros; the decoder finds the tensor in the class."""

    kept: ClassVar[dict[MessageKey, Tensor]] = {}

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        self.kept[key] = tensor.detach().float().clone()
        return super().encode(torch.zeros_like(tensor), key)

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        decoded = super().decode(payload, key)
        return self.kept[key].clone() if key in self.kept else decoded


class ForgetsToSayThatItRemembers(Good):
    """Differences from the last tensor, without shared, state, load and reset."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.last: dict[Any, Tensor] = {}

    def _before(self, shape: torch.Size, key: MessageKey) -> Tensor:
        found = self.last.get((key.phase, key.microbatch))
        return found if found is not None and found.shape == shape else torch.zeros(shape)

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        before = self._before(tensor.shape, key)
        payload = super().encode(header.check_input(tensor).float() - before, key)
        self.last[key.phase, key.microbatch] = before + super().decode(payload, key)
        return payload

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        difference = super().decode(payload, key)
        found = difference + self._before(difference.shape, key)
        self.last[key.phase, key.microbatch] = found
        return found.clone()


class DriftsSilently(ForgetsToSayThatItRemembers):
    """Says that it remembers, and does not number its messages."""

    def shared(self) -> dict[str, Tensor]:
        return {str(key): value for key, value in self.last.items()}

    def state(self) -> dict[str, Any]:
        return {"last": {key: value.clone() for key, value in self.last.items()}}

    def load(self, state: Any) -> None:
        self.last = {key: value.clone() for key, value in state["last"].items()}

    def reset(self) -> None:
        self.last = {}


class OpenLoop(DriftsSilently):
    """Sends a coarse difference and remembers the true tensor."""

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        payload = Good.encode(
            self, (header.check_input(tensor).float() - self._before(tensor.shape, key)).bfloat16(), key
        )
        self.last[key.phase, key.microbatch] = tensor.detach().float().clone()
        return payload


class LendsItsState(DriftsSilently):
    """`state` hands out the tensors that it goes on writing to."""

    def state(self) -> dict[str, Any]:
        return {"last": self.last}


class MixesThePhases(DriftsSilently):
    """An evaluation takes the place of the training tensor."""

    def _before(self, shape: torch.Size, key: MessageKey) -> Tensor:
        return super()._before(shape, key._replace(phase="train"))

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        return super().encode(tensor, key._replace(phase="train"))

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        return super().decode(payload, key._replace(phase="train"))


class ForgetsOnErrors(DriftsSilently):
    """Drops its memory before it looks at the tensor."""

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        kept = self.last.pop((key.phase, key.microbatch), None)
        header.check_input(tensor)
        if kept is not None:
            self.last[key.phase, key.microbatch] = kept
        return super().encode(tensor, key)


class TakesHostileBytesToHeart(DriftsSilently):
    """Forgets what it knew when bytes are wrong."""

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        try:
            return super().decode(payload, key)
        except CodecError:
            self.last.clear()
            raise


class SaysThatItSharesNothing(OpenLoop):
    """The ends drift apart, and there is nothing to compare them by."""

    def shared(self) -> dict[str, Tensor]:
        return {}


class ExpectsAFriendlyWorld(DriftsSilently):
    """A message that comes twice is a difference that is added twice."""


class LoadsAnything(DriftsSilently):
    """Takes any state for one of its own."""

    def load(self, state: Any) -> None:
        self.last = {key: value.clone() for key, value in state.get("last", {}).items()}


class UsesItsOutputAgain(Good):
    """One tensor for all that it decodes of a shape."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.out: dict[torch.Size, Tensor] = {}

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        found = super().decode(payload, key)
        return self.out.setdefault(found.shape, torch.empty(found.shape)).copy_(found)


class RefusesNothing(Good):
    """Whatever is wrong becomes a zero."""

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        try:
            return super().decode(payload, key)
        except CodecError:
            return torch.zeros(1)


class StumblesOverOthers(Good):
    """A message of another codec is a KeyError."""

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        return {CODE: super().decode}[bytes(payload)[0]](payload, key)


class DithersByHash(Good):
    """Subtracts the noise that it added, as long as both ends hash strings alike."""

    law = "none"

    def _noise(self, key: MessageKey, shape: torch.Size) -> Tensor:
        return torch.rand(shape, generator=torch.Generator().manual_seed(hash(key) & 0x7FFFFFFF))

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        return super().encode(header.check_input(tensor).float() + self._noise(key, tensor.shape), key)

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        found = super().decode(payload, key)
        return found - self._noise(key, found.shape)


class SwallowsNanLater(DriftsSilently):
    """A first message as it is; of a difference NaN is left out."""

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        known = (key.phase, key.microbatch) in self.last
        return super().encode(header.check_input(tensor).float().nan_to_num() if known else tensor, key)


class BoundWithoutItsLaw(Good):
    """Says that nothing can be wrong, and rounds."""

    law = "none"

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        return super().encode(header.check_input(tensor).bfloat16().float(), key)

    def bound(self, tensor: Tensor) -> Tensor:
        return torch.zeros(())


class OwesForAll(Good):
    """Error feedback with one memory for all micro-batches."""

    law = "residual"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.owed: Tensor | None = None

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        target = header.check_input(tensor).float() + (0.0 if self.owed is None else self.owed)
        coarse = target.round(decimals=0)
        self.owed = target - coarse
        return super().encode(coarse, key)

    def residual(self, key: MessageKey) -> Tensor:
        return torch.zeros(()) if self.owed is None else self.owed


class LongerThanItSays(Good):
    """Says the length of odd widths, and fills rows up to 64."""

    def payload_bytes(self, shape: tuple[int, ...]) -> int:
        return super().payload_bytes(shape) - (4 if shape and shape[-1] % 2 else 0)


class LiesAboutItsBytes(Good):
    """Says half of what it sends."""

    def payload_bytes(self, shape: tuple[int, ...]) -> int:
        return header.header_bytes(len(shape)) + 2 * math.prod(shape)


class CountsInTheClass(Good):
    """Other bytes every time: a counter of all instances goes into them."""

    law = "none"
    count: ClassVar[list[int]] = [0]

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        self.count[0] += 1
        return super().encode(tensor + self.count[0], key)


class UsesItsPayloadAgain(Good):
    """One buffer for all payloads of a length."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.buffers: dict[int, bytearray] = {}

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        payload = bytes(super().encode(tensor, key))
        buffer = self.buffers.setdefault(len(payload), bytearray(len(payload)))
        buffer[:] = payload
        return memoryview(buffer)


class LiesInTheReceiveBuffer(Good):
    """Decodes without a copy."""

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        opened = header.open_payload(payload, CODE, lambda shape: 4 * math.prod(shape))
        return header.as_tensor(opened.body, torch.float32, opened.elements).view(opened.shape)


class TrustsItsHeader(Good):
    """Sets memory aside for whatever shape the header claims."""

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        data = bytes(payload)
        if len(data) < 4 or data[0] != CODE or len(data) < 4 + 4 * data[1]:
            raise CodecError("too short")
        shape = struct.unpack_from(f"<{data[1]}I", data, 4)
        if math.prod(shape) > 2**40:
            raise CodecError("too large")
        found = torch.ones(shape)
        if len(data) != 4 + 4 * data[1] + 4 * found.numel():
            raise CodecError("another length")
        found.view(-1).copy_(
            torch.frombuffer(bytearray(data), dtype=torch.float32, offset=4 + 4 * data[1])
        ) if found.numel() else None
        return found


class StumblesOverShortBytes(Good):
    """Lets struct.error out."""

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        struct.unpack_from("<BBBBI", payload)
        return super().decode(payload, key)


class TakesItsTime(Good):
    """Counts to the number in its header before it looks whether that can be."""

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        data = bytes(payload)
        if len(data) >= 8:
            sum(range(struct.unpack_from("<I", data, 4)[0]))
        return super().decode(payload, key)


class RefusesFlatTensors(Good):
    """Only takes three axes."""

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        if tensor.ndim != 3:
            raise CodecError(f"cannot encode {key}: not three axes")
        return super().encode(tensor, key)


class TakesAnyType(Good):
    """Turns float64 and integers into fp32 without a word."""

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        return super().encode(torch.zeros(tensor.shape) if tensor.is_meta else tensor.float(), key)


class KeepsBf16(Good):
    """Hands out bf16."""

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        return super().decode(payload, key).bfloat16()


class NeedsAnAlignedBuffer(Good):
    """Goes wrong where the payload does not begin at a multiple of four."""

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        found = super().decode(payload, key)
        address = torch.frombuffer(payload, dtype=torch.uint8).data_ptr() if not isinstance(payload, bytes) else 0
        return found + address % 4


class BoundTooTight(Good):
    """Claims half of bf16's rounding error."""

    law = "bounded"

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        return super().encode(header.check_input(tensor).bfloat16().float(), key)

    def bound(self, tensor: Tensor) -> Tensor:
        return tensor.float().abs() * 2.0**-10


class GoesByItsProcess(Good):
    """Adds what its process makes of a text's hash."""

    law = "none"

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        return super().encode(tensor + hash("a text") % 1000, key)


class GoesByThreads(Good):
    """Sums in as many parts as there are threads."""

    law = "none"

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        return super().encode(tensor + torch.get_num_threads(), key)


class StopsAboveAMillion(Good):
    """Counts its values with 20 bits."""

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        if tensor.numel() >= 2**20:
            raise OverflowError("too many values")
        return super().encode(tensor, key)


class KeepsWhatItSends(Good):
    """Every tensor, for ever."""

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        self.__dict__.setdefault("kept", []).append(tensor.clone())
        return super().encode(tensor, key)


class IsSlow(Good):
    """Does its sums many times over."""

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        if tensor.numel() > 100_000:
            for _ in range(300):
                tensor.float().exp()
        return super().encode(tensor, key)


# ------------------------------------------------------------------ what changes the model
class Part:
    """A hook: the first quarter of the channels crosses, the others come out as zeros."""

    def __init__(self, stage: Any, *, sends: bool) -> None:
        self.stage, self.sends = stage, sends

    def parameters(self) -> Iterable[nn.Parameter]:
        return ()

    def rowwise(self) -> Mapping[nn.Parameter, int]:
        return {}

    def send(self, hidden: Tensor, inputs: Tensor) -> Tensor:
        return hidden[..., : self.stage.width // 4]

    def receive(self, coded: Tensor, inputs: Tensor) -> Tensor:
        return nn.functional.pad(coded, (0, self.stage.width - coded.shape[-1]))

    def begin(self, step: int, microbatches: int) -> None:
        pass

    def after_step(self, step: int, rate: float) -> None:
        pass


class Narrow(Good):
    """Keeps the rules: fp32 on the wire, and a part in the model."""

    part: type[Part] = Part

    def hook(self, model: nn.Module, side: Literal["upstream", "downstream"]) -> Part:
        return self.part(model, sends=side == "downstream")


class Constrained(Part):
    """Uses the channels that cross only: weights that write into others are zero, and are zeroed after each step."""

    def __init__(self, stage: Any, *, sends: bool) -> None:
        super().__init__(stage, sends=sends)
        self.after_step(0, 0.0)

    def written(self) -> list[Tensor]:
        parts = [*self.stage.tables(), *self.stage.writers()] if self.sends else []
        return [
            p.detach().T if isinstance(part.module, nn.Linear) and p.ndim == 2 else p.detach()
            for part in parts
            for p in part.module.parameters()
        ]

    def after_step(self, step: int, rate: float) -> None:
        for weight in self.written():
            weight[..., self.stage.width // 4 :] = 0

    def outside(self) -> float | None:
        shares = [float(one[..., self.stage.width // 4 :].norm() / one.norm()) for one in self.written()]
        return max(shares, default=None)


class Exact(Narrow):
    """Says that nothing is lost, and keeps the rules."""

    part = Constrained
    exact = True


class NeverAgain(Constrained):
    def after_step(self, step: int, rate: float) -> None:
        if rate == 0:
            super().after_step(step, rate)


class SaysExact(Narrow):
    """Says that nothing is lost, of weights that nothing constrains."""

    exact = True


class Halving(Part):
    def __init__(self, stage: Any, *, sends: bool) -> None:
        super().__init__(stage, sends=sends)
        with torch.no_grad():
            for part in stage.writers():
                part.module.weight.mul_(0.5)


class Learned(Part):
    def __init__(self, stage: Any, *, sends: bool) -> None:
        super().__init__(stage, sends=sends)
        wide, narrow = stage.width, stage.width // 4
        self.layer = nn.Linear(wide, narrow) if sends else nn.Linear(narrow, wide)

    def parameters(self) -> Iterable[nn.Parameter]:
        return self.layer.parameters()

    def send(self, hidden: Tensor, inputs: Tensor) -> Tensor:
        return self.layer(hidden)  # type: ignore[no-any-return]

    def receive(self, coded: Tensor, inputs: Tensor) -> Tensor:
        return self.layer(coded)  # type: ignore[no-any-return]


class Unsaved(Learned):
    """Says that nothing outlives a step, and learns."""

    keeps = ()


class SavesTooLittle(Narrow):
    """Says that nothing outlives a step, as does its part, which learns."""

    keeps = ()
    part = Unsaved


class Forgetful(Part):
    def receive(self, coded: Tensor, inputs: Tensor) -> Tensor:
        return coded


class Exploding(Part):
    def after_step(self, step: int, rate: float) -> None:
        with torch.no_grad():
            for part in self.stage.writers():
                part.module.weight.mul_(3.0)


class Telling(Part):
    def agreed(self) -> Mapping[str, Tensor]:
        return {"basis": torch.eye(4)[:, :2] * (1.0 if self.sends else 2.0)}


class Skewed(Part):
    def agreed(self) -> Mapping[str, Tensor]:
        return {"basis": torch.ones(4, 2)}


class HalvesGradients(Narrow):
    """Halves what goes back."""

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        return super().decode(payload, key) * (0.5 if self.context.direction == "backward" else 1.0)


def with_part(kind: type[Part]) -> type[Narrow]:
    """A codec that keeps the rules but for its part in the model."""

    class WithPart(Narrow):
        part = kind

    return WithPart


ConstrainsOnce = with_part(NeverAgain)
HalvesWeights = with_part(Halving)
DrawsItsLayers = with_part(Learned)
Explodes = with_part(Exploding)
ForgetsToWiden = with_part(Forgetful)
EndsDiffer = with_part(Telling)
NoBasis = with_part(Skewed)
