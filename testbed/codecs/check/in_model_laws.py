"""Checks of codecs that change the model, on a model of two small stages."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from testbed.codecs.catalogue.codec_spec import CodecSpec, parse_codec
from testbed.codecs.check.memory_laws import through_file
from testbed.codecs.check.row_claims import Agreeing, Constraining
from testbed.codecs.check.subject import Subject
from testbed.codecs.check.trial_model import TrialPipeline, TrialStage, changes_model, hook_of, ids_of, is_exact
from testbed.codecs.check.verdicts import NothingToAsk, difference, require, same
from testbed.codecs.contract import Context, MessageKey, Stateful
from testbed.codecs.kept_state import load_into, state_of
from testbed.codecs.make import build_codec
from testbed.codecs.wrap import capability
from testbed.errors import SpecError

_STEPS = 40
_EXACT, _ALIKE, _WITHIN, _ORTHONORMAL = 1e-5, 1e-5, 1e-5, 1e-5
"""Tolerances relative to a norm, or to 1 for a basis: some roundings of fp32."""


def _asked(subject: Subject) -> CodecSpec:
    """Return the codec if it changes the model; otherwise raise NothingToAsk."""
    if subject.direction == "backward":
        raise NothingToAsk("applies to the forward direction only")
    if not changes_model(subject.spec):
        raise NothingToAsk("it does not change the model")
    return subject.spec


def _lossless(spec: CodecSpec) -> CodecSpec:
    """Replace every inner codec that does not change the model by fp32."""
    arguments = tuple(
        (
            name,
            (_lossless(value) if _changes(value) else parse_codec("fp32")) if isinstance(value, CodecSpec) else value,
        )
        for name, value in spec.arguments
    )
    return dataclasses.replace(spec, arguments=arguments)


def _changes(spec: CodecSpec) -> bool:
    return any(part.row.hook is not None for part in spec.parts())


def trains(subject: Subject) -> str:
    """Trained through bytes, a small model's loss stays finite and falls, and both ends' states agree."""
    pipeline = TrialPipeline(_asked(subject))
    losses = [step.loss for step in pipeline.run(_STEPS)]
    require(
        all(map(math.isfinite, losses)), f"the loss is NaN or infinite after {sum(map(math.isfinite, losses))} steps"
    )
    first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    require(last < first, f"the loss does not fall in {_STEPS} steps: {first:.3f} to {last:.3f}")
    for ours, theirs in ((pipeline.sender, pipeline.receiver), (pipeline.giver, pipeline.taker)):
        ends = capability(ours, Stateful), capability(theirs, Stateful)
        if ends[0] is not None and ends[1] is not None:
            held, other = ends[0].shared(), ends[1].shared()
            require(same(held, other), f"the ends' states differ: {difference(held, other)}")
    return f"loss {first:.3f} to {last:.3f} in {_STEPS} steps"


def resumed(subject: Subject) -> str:
    """Saved in the midst of training, and loaded into new stages and codecs, it continues to train bit for bit."""
    ours, anew = TrialPipeline(_asked(subject)), TrialPipeline(subject.spec)
    half = len(list(ours.run(_STEPS // 2)))
    try:
        kept, size = through_file(state_of(ours))
    except SpecError as error:
        raise NothingToAsk(f"trainings with checkpoints refuse it: {error}") from None
    load_into(anew, kept)
    for step, other in zip(ours.run(_STEPS, half), anew.run(_STEPS, half), strict=True):
        alike = step.loss == other.loss and same(step.gradients, other.gradients)
        require(alike, f"after loading it trains to a loss of {other.loss}, not {step.loss}; keeps names too little")
    return f"{size / 1024:.0f} KiB after {half} steps, as in a checkpoint"


def shapes(subject: Subject) -> str:
    """Received hidden states of any batch and length have their original shape, gradients that of the sent values."""
    pipeline = TrialPipeline(_asked(subject))
    widths = set()
    for step, (batch, tokens) in enumerate(((4, 16), (1, 16), (2, 5), (1, 1))):
        key, inputs = MessageKey("train", step, 0, tuple(range(batch))), ids_of(step)[:batch, :tokens]
        for hook in pipeline.hooks:
            hook.begin(step, 1)
        hidden = pipeline.upper(inputs)
        coded = hidden if pipeline.above is None else pipeline.above.send(hidden, inputs)
        what = f"of hidden states {tuple(hidden.shape)}"
        require(coded.numel() <= hidden.numel(), f"{what} send increases the number of values, {tuple(coded.shape)}")
        crossed = pipeline.receiver.decode(bytes(pipeline.sender.encode(coded.detach(), key)), key).requires_grad_()
        require(
            crossed.shape == coded.shape, f"{what} {tuple(coded.shape)} are sent and {tuple(crossed.shape)} decoded"
        )
        restored = crossed if pipeline.below is None else pipeline.below.receive(crossed, inputs)
        require(restored.shape == hidden.shape, f"{what} receive makes {tuple(restored.shape)}")
        restored.square().sum().backward()  # type: ignore[no-untyped-call]
        require(crossed.grad is not None, f"{what} no gradient reaches the decoded values")
        coded.backward(crossed.grad)
        missing = [name for name, one in pipeline.upper.named_parameters() if one.requires_grad and one.grad is None]
        require(not missing, f"{what} no gradient reaches the stage's {', '.join(missing[:3])}")
        widths.add(coded.numel() / hidden.numel())
    return f"4 shapes; {', '.join(f'{width:.3g}' for width in sorted(widths))} of the values are sent"


def gradients_alike(subject: Subject) -> str:
    """With fp32 inside, gradients of all parameters equal those of the same model without a wire.

    If hidden states are transmitted without loss, they also equal those of the constrained model without the codec, up
    to the constraint.
    """
    spec = _lossless(_asked(subject))
    (ours,) = TrialPipeline(spec).run(1)
    if not ours.intact:
        raise NothingToAsk("its wire is lossy even with fp32 inside, so there is no reference")
    (theirs,) = TrialPipeline(spec, "graph").run(1)
    worst = _apart(ours.gradients, theirs.gradients, "without the wire")
    if not is_exact(subject.spec):
        changes = f"the codec's own part of the model changes hidden states by {ours.lost:.1g} of their norm"
        return f"within {worst:.1g}; {changes}"
    (alone,) = TrialPipeline(spec, "around").run(1)
    left, expected = (TrialPipeline(spec).constrained(one.gradients) for one in (ours, alone))
    whole = _apart(left, expected, "of the constrained model without the codec")
    return f"within {worst:.1g} of the model without the wire, {whole:.1g} of the constrained model alone"


def _apart(ours: dict[str, Tensor], theirs: dict[str, Tensor], what: str) -> float:
    names = ", ".join(sorted(ours.keys() ^ theirs.keys())[:3])
    require(not names, f"gradients {what} are of other parameters: {names}")
    worst = 0.0
    for name, other in theirs.items():
        apart = float((ours[name] - other).norm() / other.norm().clamp_min(1e-6))
        require(apart < _ALIKE, f"the gradient of {name} differs from that {what} by {apart:.2g} of its norm")
        worst = max(worst, apart)
    return worst


def exact(subject: Subject) -> str:
    """If the table claims no loss, hidden states are exact to 1e-5 in fp32, after every training step."""
    spec = _asked(subject)
    if not is_exact(subject.spec):
        raise NothingToAsk("neither the table nor its class claims exact hidden states")
    lost = [step.lost for step in TrialPipeline(_lossless(spec)).run(_STEPS)]
    require(max(lost) < _EXACT, f"step {lost.index(max(lost))}: hidden states are off by {max(lost):.2g} of their norm")
    return f"off by at most {max(lost):.1g} in {_STEPS} steps"


def ends_agree(subject: Subject) -> str:
    """Layers and constants depend on seed and boundary, not on a global generator; and state that both ends claim to
    share is bit-identical in every step, with orthonormal bases.
    """
    spec = _asked(subject)
    starts = []
    for seed in (1, 2):
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            before = torch.get_rng_state()
            pipeline = TrialPipeline(spec)
            starts.append({name: one.detach().clone() for name, one in pipeline.parameters().items()})
            require(same(torch.get_rng_state(), before), "a hook drew from torch's global generator")
    require(same(*starts), f"another process would start with other values: {difference(*starts)}")
    above, below = pipeline.above, pipeline.below
    if not (isinstance(above, Agreeing) and isinstance(below, Agreeing)):
        return "the same start every time; it has no method `agreed`"
    names: set[str] = set()
    worst = 0.0
    for number, _ in enumerate(pipeline.run(_STEPS)):
        ours, theirs = above.agreed(), below.agreed()
        require(same(ours, theirs), f"step {number}: after its message the ends differ in {difference(ours, theirs)}")
        names |= ours.keys()
        for basis in (value.detach().double() for name, value in ours.items() if name.startswith("basis")):
            worst = max(worst, float((basis.T @ basis - torch.eye(basis.shape[1])).abs().max()))
            require(worst < _ORTHONORMAL, f"the basis is no longer orthonormal: off by {worst:.2g}")
    return f"alike in {_STEPS} steps: {', '.join(sorted(names))}" + (f"; orthonormal to {worst:.0g}" if worst else "")


def constrained_once(subject: Subject) -> str:
    """A stage between two boundaries is hooked twice, but its weights change only once."""
    spec = _asked(subject)
    for place in ("first", "middle"):
        stage = TrialStage(place)
        hooks = [hook_of(build_codec(spec, Context(0, 1, "forward")), stage, "downstream")]
        before = {name: value.clone() for name, value in stage.state_dict().items()}
        if place == "middle":
            hooks.append(hook_of(build_codec(spec, Context(0, 0, "forward")), stage, "upstream"))
        hooks.append(hook_of(build_codec(spec, Context(0, 1, "forward")), stage, "downstream"))
        after = stage.state_dict()
        require(same(before, after), f"the {place} stage changed when hooked again: {difference(before, after)}")
        for hook in hooks:
            if isinstance(hook, Constraining) and hook.outside() is not None:
                for _ in range(2):
                    before = {name: value.clone() for name, value in stage.state_dict().items()}
                    hook.after_step(0, 0.0)
                moved = [name for name, one in stage.state_dict().items() if not _near(one, before[name])]
                require(not moved, f"the {place} stage's {', '.join(moved[:3])} changed when constrained again")
    return "the first stage, and one between two boundaries"


def _near(one: Tensor, other: Tensor) -> bool:
    return float((one - other).norm()) <= _WITHIN * float(other.norm())


def weights_stay(subject: Subject) -> str:
    """If a hook reports how far weights are outside its constraint, this is only rounding after every step."""
    pipeline = TrialPipeline(_asked(subject))
    constraining = [hook for hook in pipeline.hooks if isinstance(hook, Constraining) and hook.outside() is not None]
    if not constraining:
        raise NothingToAsk("it constrains no weights of the model")
    worst = max(hook.outside() or 0.0 for hook in constraining)
    for number, _ in enumerate(pipeline.run(_STEPS)):
        worst = max([worst, *(hook.outside() or 0.0 for hook in constraining)])
        require(worst < _WITHIN, f"after {number} steps {worst:.2g} of a weight's norm is outside the constraint")
    return f"at most {worst:.1g} of a weight's norm outside, in {_STEPS} steps"
