"""The laws of decoding errors. The table names one for each codec; a class or an instance may name its own.

If it has `bound` or `residual` (see `row_claims`), these are tested as well, for every law.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from testbed.codecs.check.subject import Subject, TrialEnd
from testbed.codecs.check.tensors import fitting, hidden, key_at, messages, normal, odd
from testbed.codecs.check.verdicts import NothingToAsk, require, same
from testbed.codecs.contract import MessageKey
from testbed.errors import CodecError

_TINY = torch.finfo(torch.float32).tiny
_FP32 = 2.0**-20
"""Relative tolerance for some fp32 roundings between the formula and a codec's computation."""
_DRAWS = 400
_SIGMAS = 5.0
_WORST_SIGMAS = 8.0
"""The limit for the mean of one value: draws of a rarely kept value are far from normal."""
_LITTLE_NOISE = 0.3
"""Minimum noise of a value, as a share of its row's root mean square noise; below this it is not used."""
_STEPS = 40


def _tried(subject: Subject, *, extreme: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield test tensors for the law, without large ones that the codec legitimately refuses.

    `extreme`: also those for which squares and sums overflow fp32.
    """
    tried = {
        name: x.detach()
        for name, x in odd().items()
        if extreme or not x.numel() or float(x.detach().abs().max()) < 1e25
    }
    tried |= {
        f"hidden states x 1e{power}": hidden(2, 16, 192, seed=power + 30) * 10.0**power for power in (-20, -6, 0, 6, 20)
    }
    for name, x in tried.items():
        if x.numel() and float(x.abs().max()) > 1e4:
            try:
                subject.fresh().encode(x, fitting(x))
            except CodecError:
                continue
        yield name, x


def _conversation(subject: Subject, steps: int) -> Iterator[tuple[MessageKey, Tensor, Tensor]]:
    """Send messages from one fresh end to another; yield sent and decoded tensors."""
    sender, receiver = subject.fresh(), subject.fresh()
    for key, x in messages(steps):
        yield key, x, receiver.decode(bytes(sender.encode(x, key)), key)


def _once(subject: Subject, x: Tensor) -> Tensor:
    """Return a tensor as decoded by a fresh pair, in fp64."""
    key = fitting(x)
    return subject.fresh().decode(bytes(subject.fresh().encode(x, key)), key).double()


def identity(subject: Subject) -> str:
    """Every value of an fp32 or bf16 tensor is preserved bit for bit."""
    count = 0
    for name, x in _tried(subject, extreme=True):
        decoded = subject.fresh().decode(bytes(subject.fresh().encode(x, fitting(x))), fitting(x))
        require(same(decoded, x.float().contiguous()), f"{name}: the decoded values differ from the input")
        count += 1
    for key, x, decoded in _conversation(subject, _STEPS):
        require(same(decoded, x), f"{key}: the decoded values differ from the input")
        count += 1
    return f"{count} tensors, bit for bit"


def bounded(subject: Subject, *, claimed: bool = False) -> str:
    """|decoded - x| <= bound(x), value by value, for first messages, and for all messages of stateless codecs. Without
    a method `bound`, or where it is infinite, no error exceeds the tensor's largest value; nor does one of a later
    message. `claimed`: test only `bound`.
    """
    worst = {True: 0.0, False: 0.0}
    for name, x in _tried(subject):
        bound = _bound(subject, x)
        if x.numel() and (bound is not None or not claimed):
            share = _share(x, _once(subject, x), bound, name)
            worst[bound is not None] = max(worst[bound is not None], share)
    if claimed:
        return f"first messages at most {worst[True]:.2f} of its bound" if worst[True] else ""
    for key, x, decoded in _conversation(subject, _STEPS):
        bound = None if subject.stateful else _bound(subject, x)
        share = _share(x, decoded.double(), bound, str(key))
        worst[bound is not None] = max(worst[bound is not None], share)
    shares = [f"{worst[True]:.2f} of its bound"] if worst[True] else []
    if worst[False] or not shares:
        shares.append(f"{worst[False]:.2f} of the tensor's largest value where it has no bound")
    return "at most " + ", ".join(shares)


def _bound(subject: Subject, x: Tensor) -> Tensor | None:
    """Return the codec's own bound, in fp64; None if it has none, or an infinite one."""
    bound = subject.fresh().bound(x).double()
    return bound if bool(bound.isfinite().all()) else None


def _share(x: Tensor, decoded: Tensor, bound: Tensor | None, name: str) -> float:
    """Return the largest error as a share of the bound, or of the tensor's largest value. Broken beyond 1."""
    wide = x.double()
    wrong = (decoded - wide).abs()
    if bound is None:
        allowed = wide.abs().amax() * (1 + _FP32) + _TINY
    else:
        allowed = bound * (1 + 2.0**-13) + _FP32 * wide.abs() + _TINY
    shares = wrong / allowed.broadcast_to(wrong.shape)
    share, at = float(shares.max()), int(shares.argmax())
    value, off = float(x.reshape(-1)[at]), float(wrong.reshape(-1)[at])
    require(share <= 1.0, f"{name}: {value:.6g} has an error of {off:.3g}, {share:.3g} times its bound")
    return share


def unbiased(subject: Subject) -> str:
    """Over many message keys the mean decoded tensor equals the input: all values together within 5 sigma, each within
    8.
    """
    x = hidden(2, 4, 64, seed=3)
    total, squares = torch.zeros_like(x, dtype=torch.float64), torch.zeros_like(x, dtype=torch.float64)
    sender, receiver = subject.fresh(), subject.fresh()
    for step in range(_DRAWS):
        if subject.stateful:
            sender, receiver = subject.fresh(step), subject.fresh(step)
        key = key_at(0 if subject.stateful else step)
        wrong = receiver.decode(bytes(sender.encode(x, key)), key).double() - x.double()
        total += wrong
        squares += wrong.square()
    mean, error = total / _DRAWS, (squares / _DRAWS**2).sqrt()
    noisy = error > 1e-6 * x.double().abs()
    require(bool(noisy.any()), "it draws no noise: every message key rounds the same way")
    # A value close to a level may round the same way in all draws, and shows no spread.
    common = _LITTLE_NOISE * error.square().mean(-1, keepdim=True).sqrt()
    z = (mean / torch.maximum(error, common).clamp_min(_TINY))[noisy]
    count = z.numel()
    spread, drift = float(z.square().mean()), float((mean * x.sign()).sum() / error.square().sum().sqrt())
    limit = 1 + _SIGMAS * (2 / count) ** 0.5 + 8 / _DRAWS
    farthest = float(z.abs().max())
    require(farthest <= _WORST_SIGMAS, f"the mean of a value over {_DRAWS} message keys is {farthest:.1f} sigma off")
    require(
        spread <= limit,
        f"the means over {_DRAWS} message keys deviate too much: mean z^2 = {spread:.2f}, limit {limit:.2f}",
    )
    require(abs(drift) <= _SIGMAS, f"values grow or shrink on average: {drift:+.1f} sigma")
    return f"{_DRAWS} message keys: mean z^2 = {spread:.2f}, drift {drift:+.1f} sigma"


def support(subject: Subject) -> str:
    """Each value is kept, within `kept_bound` (or bf16's rounding), or zero; some are kept."""
    shares = []
    for name, x in _tried(subject):
        end = subject.fresh()
        wide, decoded = x.double(), _once(subject, x)
        allowed = end.kept_bound(x).double() if "kept_bound" in end.claims else 2.0**-8 * wide.abs()
        wrong = (decoded - wide).abs() > allowed * (1 + 2.0**-13) + 1e-40 + 2.0**-20 * wide.abs()
        bad = wrong & (decoded != 0)
        require(not bool(bad.any()), f"{name}: {int(bad.sum())} of {x.numel()} values are neither zero nor preserved")
        if bool(wide.any()) and float(wide.abs().max()) > 1e-30:
            require(bool(decoded.any()), f"{name}: nothing was kept")
            shares.append(float((decoded != 0).sum() / (wide != 0).sum()))
    return f"{min(shares):.1%} to {max(shares):.1%} of the values kept"


def residual(subject: Subject) -> str:
    """payload + residual = input: over a message key's messages, the decoded sum plus the residual equals the sum of
    inputs.

    The residual comes from the encoder's method `residual`, if any; otherwise it must stay bounded while the sums grow.
    Two micro-batches alternate.
    """
    sender, receiver = subject.fresh(), subject.fresh()
    shape = (2, 8, 64)
    given, got = torch.zeros((2, *shape), dtype=torch.float64), torch.zeros((2, *shape), dtype=torch.float64)
    owed, norms, owing = [], [], "residual" in sender.claims
    steps = 120
    for step in range(steps):
        for part in range(2):
            key = key_at(3 * step, part)
            x = hidden(*shape, seed=1 + part) + 0.1 * normal(*shape, seed=2 * step + part + 50)
            payload = bytes(sender.encode(x, key))
            given[part] += x.double()
            got[part] += receiver.decode(payload, key).double()
            left = given[part] - got[part]
            norms.append(float(x.double().norm()))
            owed.append(float(left.norm()))
            if owing:
                _is_owed(sender, key, left, given[part])
    steps = len(owed)
    require(
        max(owed[steps // 2 :]) <= 1.5 * max(owed[: steps // 2]) + 1e-3 * norms[0],
        f"the residual grows: {max(owed[: steps // 2]) / norms[0]:.2f} inputs in the first half of {steps} messages, "
        f"{max(owed[steps // 2 :]) / norms[0]:.2f} in the second",
    )
    exact = "exact; " if owing else "without a method `residual`, so measured from outside; "
    most, share = max(owed) / norms[0], owed[-1] / norms[0] / steps
    return f"{exact}residual at most {most:.2f} inputs, {share:.1%} of the sum after {steps}"


def _is_owed(sender: TrialEnd, key: MessageKey, left: Tensor, given: Tensor) -> None:
    off = float((left - sender.residual(key).double()).norm() / given.norm())
    require(off < 1e-5, f"{key}: payload + residual differ from the input by {off:.2g} of the sum of inputs")


def owes(subject: Subject) -> str:
    """For a codec of another law with a method `residual`: payload + residual = input over the messages of a step,
    after which it may reset.
    """
    sender, receiver = subject.fresh(), subject.fresh()
    for step in range(10):
        given, got = torch.zeros((2, 8, 64), dtype=torch.float64), torch.zeros((2, 8, 64), dtype=torch.float64)
        for part in range(3):
            key, x = key_at(step, part), hidden(2, 8, 64, seed=3 * step + part)
            given += x.double()
            got += receiver.decode(bytes(sender.encode(x, key)), key).double()
        _is_owed(sender, key, given - got, given)
    return "residual holds over each step's messages"


def projection(subject: Subject) -> str:
    """The error is orthogonal to the decoded tensor, |decoded|^2 + |error|^2 = |x|^2, the decoded tensor is not zero,
    and it decodes to itself; each within the accuracy of 16-bit coordinates.
    """
    worst = 0.0
    for name, x in _tried(subject):
        decoded, wide = _once(subject, x), x.double()
        norm = float(wide.square().sum())
        if norm < 1e-50:
            continue
        apart = abs(float(decoded.square().sum() + (wide - decoded).square().sum()) - norm) / norm
        worst = max(worst, apart)
        require(apart < 0.02, f"{name}: |decoded|^2 + |error|^2 is {1 + apart:.4f} |x|^2")
        require(bool(decoded.any()), f"{name}: nothing was kept")
        twice = float((_once(subject, decoded.float()) - decoded).norm() / decoded.norm())
        require(twice < 0.02, f"{name}: a decoded tensor changes when sent again, by {twice:.2g} of its norm")
    return f"within {worst:.2%} of |x|^2; the same again"


def lossless(subject: Subject) -> str:
    """Decoded tensors are bit-identical to those of the inner codec alone, message after message."""
    if (alone := subject.alone) is None:
        return identity(subject)
    count = 0
    for (key, _, ours), (_, _, theirs) in zip(*(_conversation(of, 20) for of in (subject, alone)), strict=True):
        require(same(ours, theirs), f"{key}: it differs from what {alone.spec.text} alone decodes")
        count += 1
    return f"{count} messages as {alone.spec.text} decodes them"


def none(subject: Subject) -> str:
    """No law is stated."""
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
    """The law named by the table or the class; and `bound` and `residual`, if it has them."""
    law = subject.law
    require(law in LAWS, f"there is no law {law!r}; known: {', '.join(LAWS)}")
    has = subject.fresh().claims
    claims = [bounded(subject, claimed=True)] if "bound" in has and law not in ("bounded", "support") else []
    claims = [claim for claim in claims if claim]
    claims += [owes(subject)] if "residual" in has and law != "residual" else []
    try:
        return "; ".join([f"{law}: {LAWS[law](subject)}", *claims])
    except NothingToAsk:
        if not claims:
            raise
        return "; ".join(claims)
