"""How is the model itself changed, so that less of it has to cross a boundary?

model_codec        what these codecs share: what they ask of a stage's model, and what they put on the wire
subspace           subspace networks: hidden states in a subspace that every stage knows
constrained_stage  a stage of such a network: its basis, its fixed tables, its layers kept within the subspace
mapl               a learned basis for each boundary, around a small token embedding at every stage
bottleneck         learned bottlenecks: SWARM's, a linear autoencoder, a residual one
bases              bases and tables that several stages draw alike
"""
