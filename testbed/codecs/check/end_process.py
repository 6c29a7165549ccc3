"""The program that holds one end's instances of codecs and answers the kit's requests, isolated and sealed.

`python -m testbed.codecs.check.end_process REQUESTS ANSWERS`, which are descriptors. Only `apart` starts it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
import warnings
from collections.abc import Sequence
from functools import cache, partial
from multiprocessing.connection import Connection
from typing import Any, get_args

from testbed.codecs.check.seal import WRITES, isolate, seal

# Before torch is imported, which has threads; and only as a program, as whoever imports this is not to be isolated.
_limits = isolate() if __name__ == "__main__" else []

import torch  # noqa: E402

from testbed.codecs.catalogue.codec_spec import parse_codec  # noqa: E402
from testbed.codecs.check import suite  # noqa: E402
from testbed.codecs.check.packing import pack, unpack  # noqa: E402
from testbed.codecs.check.subject import TrialEnd, subject_of  # noqa: E402
from testbed.codecs.check.tensors import hidden, key_at  # noqa: E402
from testbed.codecs.check.trial_model import TrialPipeline  # noqa: E402
from testbed.codecs.check.verdicts import Broken, NothingToAsk  # noqa: E402
from testbed.errors import CodecError, SpecError  # noqa: E402
from testbed.message_key import Direction  # noqa: E402

_CLOCKS = ("monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "sleep")
"""What reads the monotonic clock, which the kernel refuses without telling."""
_KEPT = 16
"""The number of instances that no check exceeds; those that were not used for longest are dropped."""
_TOLD = 120
_subject = cache(subject_of)
_ends: dict[int, TrialEnd] = {}
_modules: set[str] = set()
_noticed: dict[str, None] = {}


def main(requests: Connection, answers: Connection) -> None:
    """Import, seal, then answer requests until there are no more."""
    sys.path[:], texts, warm = unpack(requests.recv_bytes())
    sys.dont_write_bytecode = True  # a late import would be refused to write a file
    for name in _CLOCKS:
        setattr(time, name, partial(_read_clock, name, getattr(time, name)))
    list(TrialPipeline(parse_codec("fp32")).run(1))  # torch loads much of itself when first used
    for text in texts:
        for direction in get_args(Direction):
            with contextlib.suppress(BaseException):  # a check will meet it again
                _try(text, direction, warm)
    kept = sorted((requests.fileno(), answers.fileno()))
    for begin, end in zip((3, *(fd + 1 for fd in kept)), (*kept, 1 << 16), strict=True):
        os.closerange(begin, end)
    gc.freeze()  # so that checks of memory can collect often
    listener, limits = seal()
    sys.addaudithook(_notice)
    answers.send_bytes(pack(("done", [], pack((listener, _limits + limits)))))
    with contextlib.suppress(EOFError):
        while True:
            request = unpack(requests.recv_bytes())
            if listener is not None:
                os.close(listener)  # the kit has its own
                listener = None
            _noticed.clear()
            answers.send_bytes(_answer(request))


def _try(text: str, direction: Direction, warm: bool) -> None:
    """Make instances, which imports their modules; `warm`: use them, so that they load what they need later."""
    subject = subject_of(text, direction)
    for part in subject.spec.parts():
        _modules.update(path.partition(":")[0] for path in (part.row.forward, part.row.backward))
    sender, receiver = subject.fresh(), subject.fresh()
    for step, shape in enumerate(((2, 8, 16), (4, 256, 768)) if warm else ()):
        key = key_at(step, batch=shape[0])
        receiver.decode(bytes(sender.encode(hidden(*shape), key)), key)


def _answer(request: Sequence[Any]) -> bytes:
    kind, answer = "done", None
    try:
        match request:
            case ("end", number, made, method, arguments):
                _ends[number] = end = _ends.pop(number, None) or _subject(*made[:2]).fresh(made[2])
                if len(_ends) > _KEPT:
                    del _ends[next(iter(_ends))]
                asked = getattr(end, method)
                answer = asked(*arguments) if callable(asked) else asked
            case ("check", text, direction, name):
                check = next(check for check in suite.CHECKS if check.name == name)
                answer = check.ask(subject_of(text, direction))
        packed = pack(answer)
    except (CodecError, SpecError, NothingToAsk, Broken) as error:
        kind, packed = type(error).__name__, pack(str(error))
    except BaseException as error:  # a third-party codec may raise anything
        kind, packed = "Broken", pack(f"{type(error).__name__}: {error}")
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return pack((kind, list(_noticed), packed))


def _notice(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "builtins.id":
        telling = sys._getframe(1).f_globals.get("__name__") in _modules
    else:
        telling = bool(arguments[2] & WRITES) if event == "open" else event.startswith(("os.", "socket.", "fcntl."))
    if telling:
        _noticed[f"{event}{arguments}"[:_TOLD]] = None


def _read_clock(name: str, read: Any, *arguments: Any) -> Any:
    _noticed[f"the clock (time.{name})"] = None
    return read(*arguments)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of a third-party codec
    torch.set_num_threads(1)
    main(Connection(int(sys.argv[1]), writable=False), Connection(int(sys.argv[2]), readable=False))
