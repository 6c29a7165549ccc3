"""What the tests of codecs tell an instance when they make it, and message keys."""

from __future__ import annotations

from testbed.codecs.contract import Context, MessageKey

FORWARD, BACKWARD = Context(0, 0, "forward"), Context(0, 0, "backward")


def key_at(step: int, microbatch: int = 0) -> MessageKey:
    return MessageKey("train", step, microbatch, (microbatch,))


KEY = key_at(0)
