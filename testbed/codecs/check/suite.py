"""The list of everything that the kit asks of a codec, in order, and the asking."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

from testbed.codecs.check import cost, exchange, hostile, in_model, laws, memory, oddities, size
from testbed.codecs.check.subject import Subject, subject_of
from testbed.codecs.check.verdicts import Broken, CheckResult, NothingToAsk, Verdict
from testbed.message_key import Direction


class KitCheck(NamedTuple):
    """One question that the kit asks of a codec."""

    name: str
    ask: Callable[[Subject], str]
    """Returns what was seen; raises Broken or NothingToAsk."""


CHECKS: tuple[KitCheck, ...] = (
    KitCheck("bytes as the formula says", size.payload_length),
    KitCheck("nothing hidden, both ends alike", exchange.two_instances),
    KitCheck("fresh fp32 tensor out", exchange.fresh_tensor),
    KitCheck("deterministic", exchange.deterministic),
    KitCheck("ownership", exchange.untouched),
    KitCheck("payload at any address", exchange.any_address),
    KitCheck("its law", laws.its_law),
    KitCheck("odd tensors", oddities.odd_tensors),
    KitCheck("NaN and infinity", oddities.not_finite),
    KitCheck("unfit tensors", oddities.unfit_tensors),
    KitCheck("no hidden memory", memory.history),
    KitCheck("state saved and loaded", memory.saved),
    KitCheck("lost frame, then reset", memory.lost_frame),
    KitCheck("repeated frame", memory.repeated_frame),
    KitCheck("evaluation apart", memory.evaluation_apart),
    KitCheck("errors change nothing", memory.unchanged_by_errors),
    KitCheck("hostile bytes", hostile.hostile_bytes),
    KitCheck("foreign payloads", hostile.foreign_payload),
    KitCheck("in a model: trains", in_model.trains),
    KitCheck("in a model: shapes", in_model.shapes),
    KitCheck("in a model: gradients", in_model.gradients_alike),
    KitCheck("in a model: nothing lost", in_model.exact),
    KitCheck("in a model: ends agree", in_model.ends_agree),
    KitCheck("in a model: twice is once", in_model.constrained_once),
    KitCheck("in a model: weights stay", in_model.weights_stay),
    KitCheck("cost", cost.within_a_tenth_of_the_wire),
)


def ask(check: KitCheck, subject: Subject) -> CheckResult:
    """Ask one question of one subject. Whatever a codec raises is a result, too."""
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
    return CheckResult(check.name, subject.direction, verdict, " ".join(detail.split()))


def check_codec(text: str, *, directions: tuple[Direction, ...] = ("forward", "backward")) -> Iterator[CheckResult]:
    """Ask every question of a codec, named as on the command line, in all directions before the next question.

    SpecError or UnknownNameError for one that cannot be made.
    """
    subjects = [subject_of(text, direction) for direction in directions]
    for subject in subjects:
        subject.fresh()
    for check in CHECKS:
        for subject in subjects:
            yield ask(check, subject)
