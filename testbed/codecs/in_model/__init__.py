"""How can the model itself be changed so that less data crosses a boundary?

model_codec        common part: what these codecs need from a stage's model, and their wire format
subspace           subspace networks: hidden states in a subspace that every stage knows
constrained_stage  a stage of such a network: its basis, its fixed tables, its layers kept within the subspace
mapl               a learned basis for each boundary, around a small token embedding at every stage
bottleneck         learned bottlenecks: SWARM's, a linear autoencoder, a residual one
bases              bases and tables that are identical at several stages
"""
