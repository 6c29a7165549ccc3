"""Codecs that change the model: the graph computes the values to send, and an inner codec encodes them.

No torch here.
"""

from __future__ import annotations

from typing import Any

from testbed.codecs.catalogue.row import CodecRow, CodecWork, Counts, Parameter, codec, word

_RATIO = Parameter("ratio", "float", 8, "hidden size over the number of values sent per token", least=1)
_BF16, _INT8 = (codec("inner", "the codec that sends them", default=inside) for inside in ("bf16", "int8"))
_KEEP_DOC = "method that keeps weights in the subspace: projection in each step, coordinates, or a moving basis"
_NARROW = "k*inner(b, bn/b, round(k*d)) where k = kept(1/ratio, d)"
_SPREAD = Parameter("spread", "float", 0.02, "standard deviation of the fixed tables; 1 in the released code", least=0)


_MATRIX = "4*d/(ratio*bn)"  # of d and d/ratio: read once per message
# Coordinates in a basis, without the known part of each token, which is subtracted and added; backward has no weights.
_PROJECTION = CodecWork(
    Counts(f"8 + {_MATRIX}", "4/ratio", "1 + 2*d/ratio"), Counts(f"4 + 4/ratio + {_MATRIX}", "4", "1 + 2*d/ratio")
)
_PROJECTED_GRADIENTS = CodecWork(
    Counts(f"4 + {_MATRIX}", "4/ratio", "2*d/ratio"), Counts(f"4/ratio + {_MATRIX}", "4", "2*d/ratio")
)
# Backward through a linear layer: gradients of input and weights.
_LEARNED_GRADIENTS_OUT = Counts(f"8 + 4/ratio + {_MATRIX}", f"4/ratio + {_MATRIX}", "4*d/ratio")
_LEARNED_GRADIENTS = CodecWork(
    _LEARNED_GRADIENTS_OUT, Counts(f"4 + 8/ratio + {_MATRIX}", f"4 + {_MATRIX}", "4*d/ratio")
)
_LINEAR_OUT = Counts(f"4/ratio + {_MATRIX}", "4", "2*d/ratio")


def _row(*, work: CodecWork, backward_work: CodecWork, **fields: Any) -> CodecRow:
    """Add the inner codec, which sends one of `ratio` values, to the work of the layers at both ends."""
    coded, coded_gradients = (
        layers.around("inner.encode/ratio", "inner.decode/ratio") for layers in (work, backward_work)
    )
    return CodecRow(work=coded, backward_work=coded_gradients, law="lossless", **{"bits": _NARROW, **fields})


_LAYERS_KEPT = "none but the inner codec's; its layers are the stages'"

ROWS: tuple[CodecRow, ...] = (
    _row(
        name="subspace",
        forward="testbed.codecs.in_model.subspace:Subspace",
        parameters=(
            _RATIO,
            _BF16,
            word("keep", ("projected", "reparametrised", "grassmann"), _KEEP_DOC),
            Parameter("every", "int", 500, "steps between bases, with grassmann", least=16),
            Parameter("rate", "float", 0.1, "step size of the basis, with grassmann", least=0),
            _SPREAD,
        ),
        summary="weights kept in a common subspace, so that a token's coordinates represent it exactly",
        state="the basis and a fixed embedding table, from the seed; the inner codec's",
        source="Ramasinghe et al., Protocol Models (arXiv 2506.01260)",
        work=_PROJECTION,
        backward_work=_PROJECTED_GRADIENTS,
        hook="layers and embeddings of every stage that sends write within the subspace",
        exact=True,
    ),
    _row(
        name="subspace-free",
        forward="testbed.codecs.in_model.subspace:FreeSubspace",
        parameters=(_RATIO, _BF16, _SPREAD),
        summary="the same projection without constrained weights: loses most of every tensor",
        state="as subspace",
        source="random projection; the variant without constraint",
        work=_PROJECTION,
        backward_work=_PROJECTED_GRADIENTS,
        hook="projects hidden states onto a random subspace",
        control=True,
    ),
    _row(
        name="mapl",
        forward="testbed.codecs.in_model.mapl:Mapl",
        parameters=(
            _RATIO,
            _BF16,
            Parameter("rate", "float", 0.1, "the basis's learning rate as a share of the model's", least=0),
        ),
        summary="a basis per boundary, learned on the Stiefel manifold, and a small token embedding at every stage",
        size_note="and 16 d/(ratio*bn) once per step each way",
        state="the basis; the small embedding is the stage's; the inner codec's",
        source="Janson, Oyallon, Belilovsky, MAPL (arXiv 2606.05484)",
        work=_PROJECTION,
        backward_work=_LEARNED_GRADIENTS,
        hook="projects onto the learned basis; the first stage's token embedding becomes low-rank",
    ),
    _row(
        name="bottleneck",
        forward="testbed.codecs.in_model.bottleneck:Swarm",
        parameters=(
            Parameter("ratio", "int", 4, "hidden size over the number of values sent per token", least=1),
            _INT8,
            word("kind", ("linear", "maxout"), "a linear layer, or the largest of each group"),
        ),
        summary="a learned narrow layer at the boundary",
        bits=_NARROW.replace("kept(1/ratio, d)", "groups(d, ratio) if maxout else kept(1/ratio, d)"),
        state=_LAYERS_KEPT,
        source="SWARM (Ryabinin et al., ICML 2023)",
        work=CodecWork(
            Counts(
                "8 + (0 if maxout else 4*d/(ratio*bn)) + 8/ratio",
                "8/ratio",
                "10 + 10/ratio + (0 if maxout else 2*d/ratio)",
            ),
            _LINEAR_OUT,
        ),
        backward_work=CodecWork(
            _LEARNED_GRADIENTS_OUT,
            Counts(
                "16 + 16/ratio + (0 if maxout else 4*d/(ratio*bn))",
                "8 + 4/ratio + (0 if maxout else 4*d/(ratio*bn))",
                "20 + 20/ratio + (0 if maxout else 4*d/ratio)",
            ),
        ),
        hook="LayerNorm, Linear or maxout, LayerNorm at the sender, Linear at the receiver",
    ),
    _row(
        name="autoencoder",
        forward="testbed.codecs.in_model.bottleneck:Autoencoder",
        parameters=(
            Parameter("ratio", "float", 4, "hidden size over the number of values sent per token", least=1),
            _BF16,
        ),
        summary="a learned linear encoder and decoder",
        state=_LAYERS_KEPT,
        source="Bian et al., MLSys 2024",
        work=CodecWork(Counts(f"4 + {_MATRIX}", "4/ratio", "2*d/ratio"), _LINEAR_OUT),
        backward_work=_LEARNED_GRADIENTS,
        hook="a linear layer at each end",
    ),
    _row(
        name="resbm",
        forward="testbed.codecs.in_model.bottleneck:ResBm",
        parameters=(_RATIO, _BF16),
        summary="a learned bottleneck of two layers beside an identity path",
        state=_LAYERS_KEPT,
        source="residual bottleneck, ResBM (Macrocosmos, arXiv 2604.11947)",
        work=CodecWork(Counts(f"8 + 4*d/bn + {_MATRIX}", "4 + 4/ratio", "3 + 2*d + 2*d/ratio"), _LINEAR_OUT),
        backward_work=CodecWork(
            _LEARNED_GRADIENTS_OUT,
            Counts(f"16 + 8/ratio + 4*d/bn + {_MATRIX}", f"8 + 4*d/bn + {_MATRIX}", "3 + 4*d + 4*d/ratio"),
        ),
        hook="Linear, ReLU, Linear, ReLU at the sender, Linear, ReLU at the receiver; the first channels as they are",
    ),
)
