"""The laws: what decoding may do to a tensor. The table names one for each codec; a stranger's class may name its own.

Where a class has `bound`, `residual` or `payload_bytes` (see `claims`), it is held to those as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from testbed.codecs.base import Context, Slot
from testbed.codecs.check.claims import Bounded, Owing
from testbed.codecs.check.findings import NothingToAsk, require
from testbed.codecs.check.same import same
from testbed.codecs.check.subject import Subject
from testbed.codecs.check.tensors import fitting, hidden, messages, normal, odd, slot_at
from testbed.codecs.make import build
from testbed.errors import CodecError

_TINY = torch.finfo(torch.float32).tiny
_FP32 = 2.0**-20
"""Of a value: some roundings in fp32 between the formula and what a codec computes."""
_DRAWS = 400
_SIGMAS = 5.0


def _tried(subject: Subject) -> Iterator[tuple[str, Tensor]]:
    """Tensors that the law is tried on; without large ones that the codec refuses, which is its right."""
    tried = {name: x.detach() for name, x in odd().items() if not x.numel() or float(x.detach().abs().max()) < 1e25}
    tried |= {f"hidden states x 1e{power}": hidden(2, 16, 192, seed=power + 30) * 10.0**power for power in (-20, -6, 0, 6, 20)}
    for name, x in tried.items():
        if x.numel() and float(x.abs().max()) > 1e4:
            try:
                subject.fresh().encode(x, fitting(x))
            except CodecError:
                continue
        yield name, x


def _once(subject: Subject, x: Tensor, slot: Slot | None = None) -> Tensor:
    """What a fresh pair makes of a tensor, in fp64."""
    slot = slot or fitting(x)
    return subject.fresh().decode(bytes(subject.fresh().encode(x, slot)), slot).double()


def identity(subject: Subject) -> str:
    """Every value of an fp32 or bf16 tensor comes out as it went in, to the bit."""
    count = 0
    for name, x in _tried(subject):
        decoded = subject.fresh().decode(bytes(subject.fresh().encode(x, fitting(x))), fitting(x))
        require(same(decoded, x.float().contiguous()), f"{name}: the values are not those that went in")
        count += 1
    return f"{count} tensors, bit for bit"


def bounded(subject: Subject) -> str:
    """|decoded - x| <= bound(x), value by value; without a method `bound`, no error is larger than the tensor's largest value."""
    worst, claimed = 0.0, False
    for name, x in _tried(subject):
        codec = subject.fresh()
        wide, wrong = x.double(), (_once(subject, x) - x.double()).abs()
        if isinstance(codec, Bounded):
            claimed = True
            bound = codec.bound(x).double() * (1 + 2.0**-13) + _FP32 * wide.abs() + _TINY
        else:
            bound = wide.abs().amax() * (1 + _FP32) + _TINY if x.numel() else wide
        bound = bound.broadcast_to(wrong.shape)
        if not x.numel():
            continue
        share, at = float((wrong / bound).max()), int((wrong / bound).argmax())
        worst = max(worst, share)
        value, off = float(x.reshape(-1)[at]), float(wrong.reshape(-1)[at])
        require(share <= 1.0, f"{name}: {value:.6g} is wrong by {off:.3g}, {share:.3g} times what it may be")
    return f"at most {worst:.2f} of " + ("its bound" if claimed else "the tensor's largest value; it has no method bound")


def unbiased(subject: Subject) -> str:
    """Over many slots the mean of what is decoded is the tensor: within 5 sigma, value by value and all together."""
    x = hidden(2, 4, 64, seed=3)
    total, squares = torch.zeros_like(x, dtype=torch.float64), torch.zeros_like(x, dtype=torch.float64)
    sender, receiver = subject.fresh(), subject.fresh()
    for step in range(_DRAWS):
        if subject.stateful:
            sender, receiver = subject.fresh(step), subject.fresh(step)
        slot = slot_at(0 if subject.stateful else step)
        wrong = receiver.decode(bytes(sender.encode(x, slot)), slot).double() - x.double()
        total += wrong
        squares += wrong.square()
    mean, error = total / _DRAWS, (squares / _DRAWS**2).sqrt()
    noisy = error > 1e-6 * x.double().abs()
    require(bool(noisy.any()), "it draws no noise at all: every slot rounds the same way")
    require(
        bool((mean.abs() <= 2e-6 * x.double().abs() + _TINY)[~noisy].all()), "a value is wrong, and by the same in every slot"
    )
    z = (mean / error.clamp_min(_TINY))[noisy]
    count = z.numel()
    spread, drift = float(z.square().mean()), float((mean * x.sign()).sum() / error.square().sum().sqrt())
    limit = 1 + _SIGMAS * (2 / count) ** 0.5 + 8 / _DRAWS
    require(spread <= limit, f"the means over {_DRAWS} slots lie too far off: mean z^2 = {spread:.2f}, limit {limit:.2f}")
    require(abs(drift) <= _SIGMAS, f"values grow or shrink in the mean: {drift:+.1f} sigma")
    return f"{_DRAWS} slots: mean z^2 = {spread:.2f}, drift {drift:+.1f} sigma"


def support(subject: Subject) -> str:
    """A value is kept, within `bound` (or bf16's rounding), or it is zero; some are kept."""
    shares = []
    for name, x in _tried(subject):
        codec = subject.fresh()
        wide, decoded = x.double(), _once(subject, x)
        allowed = codec.bound(x).double() if isinstance(codec, Bounded) else 2.0**-8 * wide.abs()
        wrong = (decoded - wide).abs() > allowed * (1 + 2.0**-13) + 1e-40 + 2.0**-20 * wide.abs()
        bad = wrong & (decoded != 0)
        require(not bool(bad.any()), f"{name}: {int(bad.sum())} of {x.numel()} values are neither zero nor what they were")
        if bool(wide.any()) and float(wide.abs().max()) > 1e-30:
            require(bool(decoded.any()), f"{name}: nothing was kept")
            shares.append(float((decoded != 0).sum() / (wide != 0).sum()))
    return f"{min(shares):.1%} to {max(shares):.1%} of the values kept"


def residual(subject: Subject) -> str:
    """payload + residual = input: over a slot's messages, the sum of what is decoded plus what is owed is the sum of inputs.

    What is owed is asked of the encoder where it has a method `residual`; else it must stay bounded while the sums grow.
    """
    sender, receiver = subject.fresh(), subject.fresh()
    shape = (2, 8, 64)
    given, got = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    owed, norms = [], []
    steps = 120
    for step in range(steps):
        slot, x = slot_at(3 * step), hidden(*shape, seed=1) + 0.1 * normal(*shape, seed=step + 50)
        payload = bytes(sender.encode(x, slot))
        given += x.double()
        got += receiver.decode(payload, slot).double()
        left = given - got
        norms.append(float(x.double().norm()))
        owed.append(float(left.norm()))
        if isinstance(sender, Owing):
            told = sender.residual(slot).double()
            off = float((left - told).norm() / given.norm())
            require(off < 1e-5, f"step {step}: payload + residual differ from the input by {off:.2g} of the sum of inputs")
    require(
        max(owed[steps // 2 :]) <= 1.5 * max(owed[: steps // 2]) + 1e-3 * norms[0],
        f"what is owed grows: {max(owed[: steps // 2]) / norms[0]:.2f} inputs in the first half of {steps} messages, "
        f"{max(owed[steps // 2 :]) / norms[0]:.2f} in the second",
    )
    exact = "exact; " if isinstance(sender, Owing) else "without a method residual, so from outside; "
    return f"{exact}it owes at most {max(owed) / norms[0]:.2f} inputs, {owed[-1] / norms[0] / steps:.1%} of the sum after {steps}"


def projection(subject: Subject) -> str:
    """The error is orthogonal to what is decoded: |decoded|^2 + |error|^2 = |x|^2, within what 16-bit coordinates allow."""
    worst = 0.0
    for name, x in _tried(subject):
        decoded, wide = _once(subject, x), x.double()
        norm = float(wide.square().sum())
        if norm < 1e-50:
            continue
        apart = abs(float(decoded.square().sum() + (wide - decoded).square().sum()) - norm) / norm
        worst = max(worst, apart)
        require(apart < 0.02, f"{name}: |decoded|^2 + |error|^2 is {1 + apart:.4f} |x|^2")
    return f"within {worst:.2%} of |x|^2"


def lossless(subject: Subject) -> str:
    """What is decoded is what the inner codec alone decodes, bit for bit, message after message."""
    if subject.inner is None:
        return identity(subject)
    context = Context(0, 0, subject.direction)
    pairs = (subject.fresh(), subject.fresh()), (build(subject.inner, context), build(subject.inner, context))
    count = 0
    for slot, x in messages(20):
        ours, theirs = (receiver.decode(bytes(sender.encode(x, slot)), slot) for sender, receiver in pairs)
        require(same(ours, theirs), f"{slot}: it differs from what {subject.inner.text} alone decodes")
        count += 1
    return f"{count} messages as {subject.inner.text} decodes them"


def none(subject: Subject) -> str:
    """No law was stated."""
    error = float((_once(subject, x := hidden(2, 16, 192, seed=5)) - x.double()).norm() / x.double().norm())
    raise NothingToAsk(f"no law is stated; the relative error of a first message of hidden states is {error:.3g}")


LAWS: Mapping[str, Callable[[Subject], str]] = {
    "identity": identity,
    "bounded": bounded,
    "unbiased": unbiased,
    "support": support,
    "residual": residual,
    "projection": projection,
    "lossless": lossless,
    "none": none,
}


def its_law(subject: Subject) -> str:
    """The law that the table, or the class, names."""
    law = subject.law
    require(law in LAWS, f"there is no law {law!r}; known: {', '.join(LAWS)}")
    return f"{law}: {LAWS[law](subject)}"
