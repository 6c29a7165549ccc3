"""How does a boundary's tensor become bytes, and a tensor again? Codecs know no sockets and no schedule.

contract   what a codec is, and what it may have besides
catalogue  the list: names, parameters, sizes; from a text to a class, without torch
make       from a text to an instance
dense      every value, with fewer bits: casts and quantisers
sparse     few values, and where they were
memory     differences from earlier messages, and error feedback
in_model   codecs that change the model
low_rank   PowerSGD, and with coded factors
lossless   packing of another codec's payload
adaptive   a choice of codecs, by what the link carries
warmup     values as they are for the first steps, then another codec
wire       what payloads are made of: headers, bodies, bits, noise
wrap       what a codec around other codecs needs
remembered what a codec remembers by key: saved, checked, forgotten
check      the kit: does a codec, ours or a stranger's, keep the rules?
bench      how long encode and decode take, beside other packages' codecs

README.md shows how to write a codec of one's own.
"""
