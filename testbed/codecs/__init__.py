"""How does a boundary's tensor become bytes, and a tensor again? Codecs are independent of sockets and schedules.

contract   the protocol of a codec, and its optional parts
catalogue  the list: names, parameters, sizes; from a text to a class, without torch
make       from a text to an instance
dense      all values with fewer bits: casts and quantisers
sparse     few values and their positions
memory     differences from earlier messages, and error feedback
in_model   codecs that change the model
low_rank   PowerSGD, and a variant with coded factors
residual_vq PowerSGD's factors, residually vector-quantised
lossless   compression of another codec's payload
adaptive   chooses a codec by the link's measured rate
warmup     uncompressed values in the first steps, then another codec
wire       parts of payloads: headers, bodies, bits, noise
wrap       helpers for codecs around other codecs
kept_state what outlives a step, of codecs, hooks and whole nodes: saved in checkpoints, and restored
remembered keyed state of a codec: saving, checking, resetting
check      the conformance tests for codecs, shipped or user-defined
bench      cost of encode and decode, compared with other packages' codecs

README.md shows how to write a codec.
"""
