"""All that the kit asks of a codec, in order, and the asking."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

from testbed.codecs.check import cost, exchange, hostile, laws, memory, models, oddities, size
from testbed.codecs.check.findings import Broken, Finding, NothingToAsk, Verdict
from testbed.codecs.check.subject import Subject, subject_of
from testbed.message_key import Direction


class Check(NamedTuple):
    """One question."""

    name: str
    ask: Callable[[Subject], str]
    """Returns what was seen; raises Broken or NothingToAsk."""


CHECKS: tuple[Check, ...] = (
    Check("bytes as the formula says", size.payload_length),
    Check("nothing hidden, both ends alike", exchange.two_instances),
    Check("fresh fp32 tensor out", exchange.fresh_tensor),
    Check("deterministic", exchange.deterministic),
    Check("ownership", exchange.untouched),
    Check("payload at any address", exchange.any_address),
    Check("its law", laws.its_law),
    Check("odd tensors", oddities.odd_tensors),
    Check("NaN and infinity", oddities.not_finite),
    Check("unfit tensors", oddities.unfit_tensors),
    Check("no hidden memory", memory.history),
    Check("state saved and loaded", memory.saved),
    Check("lost frame, then reset", memory.lost_frame),
    Check("repeated frame", memory.repeated_frame),
    Check("evaluation apart", memory.evaluation_apart),
    Check("errors change nothing", memory.unchanged_by_errors),
    Check("hostile bytes", hostile.hostile_bytes),
    Check("foreign payloads", hostile.foreign_payload),
    Check("in a model: trains", models.trains),
    Check("in a model: shapes", models.shapes),
    Check("in a model: gradients", models.gradients_alike),
    Check("in a model: nothing lost", models.exact),
    Check("in a model: ends agree", models.ends_agree),
    Check("in a model: twice is once", models.constrained_once),
    Check("in a model: weights stay", models.weights_stay),
    Check("cost", cost.within_a_tenth_of_the_wire),
)


def ask(check: Check, subject: Subject) -> Finding:
    """One check of one subject. Whatever a codec raises is a finding, too."""
    verdict: Verdict = "PASS"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those that a stranger's codec causes are not the kit's to print
            detail = check.ask(subject)
    except NothingToAsk as reason:
        verdict, detail = "-", str(reason)
    except Broken as broken:
        verdict, detail = "FAIL", str(broken)
    except Exception as error:  # a stranger's codec may raise anything
        verdict, detail = "FAIL", f"{type(error).__name__}: {error}"
    return Finding(check.name, subject.direction, verdict, " ".join(detail.split()))


def check(text: str, *, directions: tuple[Direction, ...] = ("forward", "backward")) -> Iterator[Finding]:
    """Every check of a codec, named as on the command line, in all directions before the next check.

    SpecError or UnknownNameError for one that cannot be made.
    """
    subjects = [subject_of(text, direction) for direction in directions]
    for subject in subjects:
        subject.fresh()
    for one in CHECKS:
        for subject in subjects:
            yield ask(one, subject)
