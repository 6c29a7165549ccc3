"""What are the parts of a payload, and how are they checked?

message encode and decode common to codecs: `BodyCodec`, whose subclasses define only fields and maths
header   the start of payloads; checks of input tensors and received bytes
bits     codes of 1 to 8 bits, packed into bytes
noise    random numbers keyed by seed, boundary, direction and message
scratch memory that a codec reuses for its next message
"""
