"""Context parallel training: sequences are split over nodes; each node has all weights and one chunk of positions.

In each layer a node projects its chunk, sends keys and values to the nodes whose later chunks attend to them, and
attends to its own and all earlier positions. Gradients of keys and values go back to the chunk's owner, which adds them
up, starting with the last node's. At the end of a step nodes sum the gradients of the weights: node p sums part p,
starting with the last node's, and sends the sum to every node: the bytes of a ring all-reduce, in two hops.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from testbed.jobs.actions import Begin, Decode, Encode, EndStep, Key, Meet, Node, Program, Receive, Send, Work
from testbed.jobs.kind import JobKind, Setting
from testbed.jobs.recorder import Named
from testbed.message_key import Phase


class ContextParallel(JobKind):
    """Nodes that train together, in the order of their chunks."""

    computes = ("forward", "backward")

    nodes: int = Field(ge=1)
    layers: int = Field(ge=1)
    """Number of layers of the model, which a program must know."""
    exchange: Literal["direct", "chain"] = "direct"
    """How keys and values reach later nodes. direct: each node sends its own to all of them. chain: each node forwards
    received messages undecoded to the next, as in ring attention (arXiv 2310.01889) without the hops that no query
    needs; gradients are summed on the way back, and re-encoded at each hop."""
    weights: str = "fp32"
    """Codec of the weight gradients and of their sums."""
    subspace: int | None = Field(default=None, ge=1)
    """Dimension of the subspace to which a layer's keys and values are constrained; coordinates in it are sent. The
    subspace is a learned part of the model (after arXiv 2606.16384, whose mixtures choose among several)."""
    fixed: bool = False
    """Whether the subspaces keep their random initial values."""
    validation_batches: int = Field(default=0, ge=0)
    """Batches evaluated after the last step: the workload's number, or 0."""

    @property
    def places(self) -> Sequence[str]:
        """The names of the nodes."""
        return tuple(f"node {node}" for node in range(self.nodes))

    @property
    def needs_star(self) -> bool:
        return len(self.places) > 2

    @property
    def more_codecs(self) -> Sequence[str]:
        return (self.weights,)

    @property
    def in_short(self) -> tuple[str, str]:
        constrained = (
            "" if self.subspace is None else f", {'fixed' if self.fixed else 'learned'} subspace {self.subspace}"
        )
        return f"{self.nodes} chunks", f"context, {self.exchange}{constrained}"

    @property
    def played(self) -> ContextParallel:
        return self.model_copy(update={"validation_batches": 0})

    def named(self, key: Key) -> Named:
        """Name gradients by layer, chunk and sender, and keys and values by layer and chunk."""
        after = self.layers * self.nodes**2
        match key.what:
            case "weights" | "sum":
                number = after + key.part
            case _:
                number = key.origin * self.nodes**2 + key.part
                number += after * key.step if key.phase == "evaluation" else 0
        return Named("backward" if key.what.startswith(("gradient", "weights")) else "forward", number)

    def node(self, place: int, setting: Setting) -> Node:
        # Imported here, because nodes import this module and torch.
        node: Node = importlib.import_module("testbed.nodes.context_node").ContextNode(place, self, setting)
        return node

    # An action of the records waits for its input, computes and sends, so a layer takes two actions forward and,
    # backward, two plus one per earlier chunk.
    def program(self, place: int, first_step: int = 0) -> Program:
        """Return the program of a node, from that step on."""
        step, goes_on = first_step, True
        while goes_on:
            loss = yield from self._forward(place, step)
            yield from self._backward(place, step)
            yield from self._update(place, step)
            yield Work("note", Key("note", step), (yield Meet(loss)))
            goes_on = yield EndStep(step)
            step += 1
        if self.validation_batches:
            for batch in range(self.validation_batches):
                loss = yield from self._forward(place, batch, "evaluation", batch * (2 * self.layers + 1))
            yield Begin()
            yield Work("note", Key("note", step, phase="evaluation"), (yield Meet(loss)))
            yield EndStep(step, "evaluation")

    def _forward(self, me: int, step: int, phase: Phase = "train", first: int = 0) -> Program:
        """Run a batch through all layers; returns the loss of this node's tokens since the last `note`. `first` numbers
        the first action.
        """
        chain, later = self.exchange == "chain", range(me + 1, self.nodes)
        for layer in range(self.layers):
            yield Begin("F", first + 2 * layer)
            mine = yield Work("project", Key("project", step, me, layer, phase))
            if later:
                message = yield Encode(Key("keys", step, me, layer, phase), mine)
                for peer in later[:1] if chain else later:
                    yield Send(message, peer)
            yield Begin("F", first + 2 * layer + 1)
            came = []
            for chunk in reversed(range(me)):
                message = yield Receive(Key("keys", step, chunk, layer, phase), me - 1 if chain else chunk)
                if chain and later:
                    yield Send(message, me + 1)
                came += yield Decode((message,))
            yield Work("attend", Key("attend", step, me, layer, phase), came)
        yield Begin("F", first + 2 * self.layers)
        return (yield Work("loss", Key("loss", step, me, self.layers, phase)))

    def _backward(self, me: int, step: int) -> Program:
        """Propagate the loss's gradient back through all layers."""
        chain, n = self.exchange == "chain", self.nodes
        yield Begin("B", self.layers * (n + 1))
        yield Work("loss_backward", Key("loss", step, me, self.layers))
        for layer in reversed(range(self.layers)):
            first = layer * (n + 1)
            yield Begin("B", first + n)
            yield Work("attend_backward", Key("attend", step, me, layer))
            for chunk in range(me):
                yield Begin("B", first + 1 + chunk)
                later: Any = None
                if chain and me + 1 < n:
                    message = yield Receive(Key("gradient", step, chunk * n + me + 1, layer), me + 1)
                    (later,) = yield Decode((message,))
                total = yield Work("add", Key("add", step, chunk, layer), later)
                message = yield Encode(Key("gradient", step, chunk * n + me, layer), total)
                yield Send(message, me - 1 if chain else chunk)
            yield Begin("B", first)
            came = []
            for peer in range(me + 1, min(me + 2, n)) if chain else range(n - 1, me, -1):
                message = yield Receive(Key("gradient", step, me * n + peer, layer), peer)
                came += yield Decode((message,))
            yield Work("project_backward", Key("project", step, me, layer), came)

    def _update(self, me: int, step: int) -> Program:
        """Sum the weight gradients over all nodes, then update."""
        others = [(me + further) % self.nodes for further in range(1, self.nodes)]
        yield Begin("A", 0)
        for part in others:
            gradient = yield Work("part", Key("part", step, part))
            message = yield Encode(Key("weights", step, part, me), gradient)
            yield Send(message, part)
        yield Begin("A", 1)
        came = []
        for peer in sorted(others, reverse=True):
            came.append((yield Receive(Key("weights", step, me, peer), peer)))
        values = (yield Decode(tuple(came))) if came else []
        total = yield Work("sum", Key("sum", step, me), values)
        message = yield Encode(Key("sum", step, me, me), total)
        sums = {me: message}
        for peer in others:
            yield Send(message, peer)
        yield Begin("A", 2)
        for part in others:
            sums[part] = yield Receive(Key("sum", step, part, part), part)
        values = yield Decode(tuple(sums[part] for part in range(self.nodes)))
        yield Work("update", Key("update", step), values)
