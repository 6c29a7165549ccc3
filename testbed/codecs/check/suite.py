"""The list of all checks, in order, and running them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

from testbed.codecs.check import cost, exchange, hostile, in_model_laws, laws, memory_laws, oddities, size
from testbed.codecs.check.apart import Ends, Place
from testbed.codecs.check.subject import Subject, subject_of
from testbed.codecs.check.verdicts import Broken, CheckResult, NothingToAsk, Verdict
from testbed.errors import printable
from testbed.message_key import Direction

_SEVERAL = 3
"""How many times as long as for one request a whole check may take."""
_FEW, _PRINTED = 3, 200


class KitCheck(NamedTuple):
    """One check of a codec."""

    name: str
    ask: Callable[[Subject], str]
    """Returns a summary; raises Broken or NothingToAsk."""
    inside: Place | None = None
    """The process that runs all of it, because it looks at memory, layers or time; None: the kit does, and asks both
    processes for single results."""
    memory_bytes: int | None = None
    """The additional memory that the process may allocate."""


CHECKS: tuple[KitCheck, ...] = (
    KitCheck("bytes as the formula says", size.payload_length, "encoder"),
    KitCheck("nothing hidden, both ends alike", exchange.two_instances),
    KitCheck("deterministic", exchange.deterministic, "encoder"),
    KitCheck("any number of threads", exchange.threads, "encoder"),
    KitCheck("ownership", exchange.untouched, "encoder"),
    KitCheck("payload at any address", exchange.any_address, "encoder"),
    KitCheck("its law", laws.its_law),
    KitCheck("odd tensors", oddities.odd_tensors),
    KitCheck("large tensors", oddities.large_tensor),
    KitCheck("NaN and infinity", oddities.not_finite),
    KitCheck("unfit tensors", oddities.unfit_tensors),
    KitCheck("no hidden memory", memory_laws.history),
    KitCheck("bounded memory", memory_laws.bounded_memory, "encoder"),
    KitCheck("state saved and loaded", memory_laws.saved, "encoder"),
    KitCheck("lost frame, then reset", memory_laws.lost_frame),
    KitCheck("repeated frame", memory_laws.repeated_frame),
    KitCheck("evaluation apart", memory_laws.evaluation_apart),
    KitCheck("errors change nothing", memory_laws.unchanged_by_errors),
    KitCheck("hostile bytes", hostile.hostile_bytes, "decoder", hostile.MEMORY_BYTES),
    KitCheck("foreign payloads", hostile.foreign_payload, "decoder"),
    # After those before, because what it encodes in the decoder's process need not be hidden from it any more.
    KitCheck("two runs alike", exchange.two_processes),
    KitCheck("in a model: trains", in_model_laws.trains, "encoder"),
    KitCheck("in a model: resumed", in_model_laws.resumed, "encoder"),
    KitCheck("in a model: shapes", in_model_laws.shapes, "encoder"),
    KitCheck("in a model: gradients", in_model_laws.gradients_alike, "encoder"),
    KitCheck("in a model: nothing lost", in_model_laws.exact, "encoder"),
    KitCheck("in a model: ends agree", in_model_laws.ends_agree, "encoder"),
    KitCheck("in a model: twice is once", in_model_laws.constrained_once, "encoder"),
    KitCheck("in a model: weights stay", in_model_laws.weights_stay, "encoder"),
    KitCheck("cost", cost.within_a_tenth_of_the_wire, "encoder"),
)


def ask(check: KitCheck, subject: Subject) -> CheckResult:
    """Run one check on one subject. Any exception of a codec becomes a result, and so does what its processes tried."""
    verdict: Verdict = "PASS"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # do not print warnings of a third-party codec
            detail = _told(check, subject)
    except NothingToAsk as reason:
        verdict, detail = "-", str(reason)
    except Broken as broken:
        verdict, detail = "FAIL", str(broken)
    except Exception as error:  # a third-party codec may raise anything
        verdict, detail = "FAIL", f"{type(error).__name__}: {error}"
    seen = [detail] if verdict == "FAIL" else []
    if (ends := subject.ends) is not None:
        if ends.refused:
            seen.insert(0, f"it asked the kernel for {', '.join(ends.refused)}, and was refused")
        if (text := ends.printed.decode(errors="replace")) != printable(text):
            seen.insert(0, f"it printed characters that control terminals: {text[:_PRINTED]}")
        seen += list(ends.noticed)[:_FEW] if seen else []
        ends.refused, ends.noticed, ends.printed = {}, {}, b""
    if seen and detail != printable(detail):
        seen.insert(0, "its error has characters that control terminals")
    if seen:
        verdict, detail = "FAIL", "; ".join(seen)
    return CheckResult(check.name, subject.direction, verdict, printable(" ".join(detail.split())))


def _told(check: KitCheck, subject: Subject) -> str:
    if (ends := subject.ends) is None or check.inside is None:
        return check.ask(subject)
    ends.limit_memory(check.inside, check.memory_bytes)
    try:
        request = ("check", subject.text, subject.direction, check.name)
        return str(ends.ask(check.inside, *request, limit_s=_SEVERAL * ends.limit_s))
    finally:
        ends.limit_memory(check.inside, None)


def check_codec(
    text: str, ends: Ends, *, directions: tuple[Direction, ...] = ("forward", "backward")
) -> Iterator[CheckResult]:
    """Run every check on a codec, named as on the command line; each in all directions before the next.

    SpecError or UnknownNameError for an invalid codec.
    """
    subjects = [subject_of(text, direction, ends) for direction in directions]
    for subject in subjects:
        with contextlib.suppress(Broken):  # a check will meet it again
            subject.fresh().claims  # noqa: B018  # which makes it
    for check in CHECKS:
        for subject in subjects:
            yield ask(check, subject)
