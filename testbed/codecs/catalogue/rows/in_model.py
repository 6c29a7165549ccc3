"""Codecs that change the model: what crosses is made in the graph, and an inner codec puts it on the wire.

No torch here.
"""

from __future__ import annotations

from testbed.codecs.catalogue.row import CodecRow, Counts, Parameter, Work

_RATIO = Parameter("ratio", "float", 8, "hidden size over the number of values that cross per token", least=1)
_BF16 = Parameter("inner", "codec", "bf16", "the codec that sends them")
_INT8 = Parameter("inner", "codec", "int8", "the codec that sends them")
_NARROW = "k*inner(b, bn/b, round(k*d)) where k = kept(1/ratio, d)"
_SPREAD = Parameter("spread", "float", 0.02, "standard deviation of the fixed tables; 1 in the released code", least=0)
_SUBSPACE = "testbed.codecs.in_model.subspace:Subspace"
_SSN = "Ramasinghe et al., Protocol Models (arXiv 2506.01260)"


def _layers(encode: Counts, decode: Counts) -> Work:
    """Add the inner codec, which sends one of `ratio` values, to what the layers at both ends do."""
    return Work(*(
        Counts(*(f"{count} + inner.{end}/ratio" for count in layers))
        for end, layers in (("encode", encode), ("decode", decode))
    ))  # fmt: skip


_MATRIX = "4*d/(ratio*bn)"  # of d and d/ratio: read once per message
# Coordinates in a basis, what every end knows of a token apart taken off and put back; backward no weights are learned.
_PROJECTION = _layers(
    Counts(f"8 + {_MATRIX}", "4/ratio", "1 + 2*d/ratio"),
    Counts(f"4 + 4/ratio + {_MATRIX}", "4", "1 + 2*d/ratio"),
)
_PROJECTED_GRADIENTS = _layers(
    Counts(f"4 + {_MATRIX}", "4/ratio", "2*d/ratio"), Counts(f"4/ratio + {_MATRIX}", "4", "2*d/ratio")
)
# Backward through a linear layer: the gradients of what came in, and of the weights.
_LEARNED_GRADIENTS_OUT = Counts(f"8 + 4/ratio + {_MATRIX}", f"4/ratio + {_MATRIX}", "4*d/ratio")
_LEARNED_GRADIENTS = _layers(
    _LEARNED_GRADIENTS_OUT,
    Counts(f"4 + 8/ratio + {_MATRIX}", f"4 + {_MATRIX}", "4*d/ratio"),
)
_LINEAR_OUT = Counts(f"4/ratio + {_MATRIX}", "4", "2*d/ratio")

ROWS: tuple[CodecRow, ...] = (
    CodecRow(
        name="subspace",
        forward=_SUBSPACE,
        backward=_SUBSPACE,
        parameters=(
            _RATIO,
            _BF16,
            Parameter(
                "keep",
                "word",
                "projected",
                "how weights stay in the subspace: projected each step, as coordinates, or with a basis that moves",
                choices=("projected", "reparametrised", "grassmann"),
            ),
            Parameter("every", "int", 500, "steps from one basis to the next, with grassmann", least=16),
            Parameter("rate", "float", 0.1, "how far the basis goes, with grassmann", least=0),
            _SPREAD,
        ),
        summary="weights kept in a subspace that all stages know, so that a token's coordinates are all of it; exact",
        bits=_NARROW,
        state="the basis and a fixed embedding table, from the seed; the inner codec's",
        source=_SSN,
        work=_PROJECTION,
        backward_work=_PROJECTED_GRADIENTS,
        law="lossless",
        hook="layers and embeddings of every stage that sends write within the subspace",
        exact=True,
    ),
    CodecRow(
        name="subspace-free",
        forward="testbed.codecs.in_model.subspace:FreeSubspace",
        parameters=(_RATIO, _BF16, _SPREAD),
        summary="the same projection with weights that nothing keeps in the subspace: loses most of every tensor",
        bits=_NARROW,
        state="as subspace",
        source="random projection; the variant without constraint",
        work=_PROJECTION,
        backward_work=_PROJECTED_GRADIENTS,
        law="lossless",
        hook="projects hidden states onto a random subspace",
        control=True,
    ),
    CodecRow(
        name="mapl",
        forward="testbed.codecs.in_model.mapl:Mapl",
        parameters=(
            _RATIO,
            _BF16,
            Parameter("rate", "float", 0.1, "the basis's learning rate as a share of the model's", least=0),
        ),
        summary="a basis per boundary, learned on the Stiefel manifold, and a small token embedding at every stage",
        bits=_NARROW,
        size_note="and 16 d/(ratio*bn) once per step each way",
        state="the basis; the small embedding is the stage's; the inner codec's",
        source="Janson, Oyallon, Belilovsky, MAPL (arXiv 2606.05484)",
        work=_PROJECTION,
        backward_work=_LEARNED_GRADIENTS,
        law="lossless",
        hook="projects onto the learned basis; the first stage's token embedding becomes low-rank",
    ),
    CodecRow(
        name="bottleneck",
        forward="testbed.codecs.in_model.bottleneck:Swarm",
        parameters=(
            Parameter("ratio", "int", 4, "hidden size over the number of values that cross per token", least=1),
            _INT8,
            Parameter(
                "kind", "word", "linear", "a linear layer, or the largest of each group", choices=("linear", "maxout")
            ),
        ),
        summary="a learned narrow layer at the boundary",
        bits=_NARROW.replace("kept(1/ratio, d)", "groups(d, ratio) if maxout else kept(1/ratio, d)"),
        state="none but the inner codec's; its layers are the stages'",
        source="SWARM (Ryabinin et al., ICML 2023)",
        work=_layers(
            Counts(
                "8 + (0 if maxout else 4*d/(ratio*bn)) + 8/ratio",
                "8/ratio",
                "10 + 10/ratio + (0 if maxout else 2*d/ratio)",
            ),
            _LINEAR_OUT,
        ),
        backward_work=_layers(
            _LEARNED_GRADIENTS_OUT,
            Counts(
                "16 + 16/ratio + (0 if maxout else 4*d/(ratio*bn))",
                "8 + 4/ratio + (0 if maxout else 4*d/(ratio*bn))",
                "20 + 20/ratio + (0 if maxout else 4*d/ratio)",
            ),
        ),
        law="lossless",
        hook="LayerNorm, Linear or maxout, LayerNorm at the sender, Linear at the receiver",
    ),
    CodecRow(
        name="autoencoder",
        forward="testbed.codecs.in_model.bottleneck:Autoencoder",
        parameters=(
            Parameter("ratio", "float", 4, "hidden size over the number of values that cross per token", least=1),
            _BF16,
        ),
        summary="a learned linear encoder and decoder",
        bits=_NARROW,
        state="none but the inner codec's; its layers are the stages'",
        source="Bian et al., MLSys 2024",
        work=_layers(Counts(f"4 + {_MATRIX}", "4/ratio", "2*d/ratio"), _LINEAR_OUT),
        backward_work=_LEARNED_GRADIENTS,
        law="lossless",
        hook="a linear layer at each end",
    ),
    CodecRow(
        name="resbm",
        forward="testbed.codecs.in_model.bottleneck:ResBm",
        parameters=(_RATIO, _BF16),
        summary="a learned bottleneck of two layers beside an identity path",
        bits=_NARROW,
        state="none but the inner codec's; its layers are the stages'",
        source="residual bottleneck, ResBM (Macrocosmos, arXiv 2604.11947)",
        work=_layers(Counts(f"8 + 4*d/bn + {_MATRIX}", "4 + 4/ratio", "3 + 2*d + 2*d/ratio"), _LINEAR_OUT),
        backward_work=_layers(
            _LEARNED_GRADIENTS_OUT,
            Counts(f"16 + 8/ratio + 4*d/bn + {_MATRIX}", f"8 + 4*d/bn + {_MATRIX}", "3 + 4*d + 4*d/ratio"),
        ),
        law="lossless",
        hook="Linear, ReLU, Linear, ReLU at the sender, Linear, ReLU at the receiver; the first channels as they are",
    ),
)
