"""The cells of an advice: its layouts as they can be played here, and as an experiment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from testbed.frozen import toml_text
from testbed.predict.data_parallel_shapes import resolve_data_parallel
from testbed.predict.hybrid_shapes import resolve_hybrid
from testbed.predict.shapes import resolve_shape
from testbed.profiles import LinkProfile
from testbed.profiles.link_text import is_link_text

if TYPE_CHECKING:
    from testbed.predict.advice import Layout, Setting

Kind = Literal["pipeline", "data parallel", "hybrid"]
RESOLVE: Final[Mapping[Kind, Callable[[Mapping[str, Any], str], Any]]] = {
    "pipeline": resolve_shape,
    "data parallel": resolve_data_parallel,
    "hybrid": resolve_hybrid,
}
_PLAYED_PACKETS, _LEAST_PACKETS = 12_000, {"hybrid": 1}
"""Packets per step to play: messages of a large job are divided until no more are left, or the smallest message has 4;
1 where the exchange of replicas is most of the traffic."""


def playable(text: str, link: LinkProfile) -> str:
    """Return a link as it can be played with divided rates: nothing is lost, and buffers hold all that waits."""
    kinds = ("loss", "jitter_ns", "reorder", "jitter_reorders", "duplicate", "queue", "slot")
    found = [kind for kind in kinds if any(getattr(pipe, kind) for pipe in link.pipes)]
    names = [{"jitter_ns": "jitter", "jitter_reorders": "reorder"}.get(kind, kind) for kind in found]
    added = ", ".join(["buffer=8GB", *(f"{name}=none" for name in dict.fromkeys(names))])
    return f"{text.strip()[:-1].rstrip()}, {added})" if is_link_text(text) else f"{text.strip()}, {added}"


def cell(layout: Layout, setting: Setting) -> dict[str, Any]:
    """Return the fields of a layout's cell."""
    shape = RESOLVE[layout.kind](layout.job, "a layout")
    packets = min(
        256, max(_LEAST_PACKETS.get(layout.kind, 4), _PLAYED_PACKETS * min(shape.message_bytes) // shape.payload_bytes)
    )
    fields = {**layout.job, "packets": packets, "steps": 6 if layout.kind == "data parallel" else 3}
    if layout.kind != "hybrid":
        fields |= {"links": playable(setting.asked.profile, setting.link), "topology": "star"}
    return fields


def experiment(setting: Setting, layouts: Sequence[Layout]) -> str:
    """Return the text of a cells.toml with a grid for each layout."""
    asked = setting.asked
    question = f"Is the advice for {asked.model} on {asked.nodes} {asked.device} behind {asked.profile} right?"
    grids = [
        f"[grid.choice-{number}.cell]\n"
        + "".join(f"{key} = {_inline(value)}\n" for key, value in cell(one, setting).items())
        for number, one in enumerate(layouts, 1)
    ]
    return "\n".join([f"question = {toml_text(question)}\n", *grids])


def _inline(value: Any) -> str:
    """Write a value of a cell in TOML."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_inline(one)}" for key, one in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_inline, value)) + "]"
    return toml_text(value) if isinstance(value, str) else str(value).lower()
