"""What is a payload made of, and who checks it?

message  the encode and decode that codecs share: `BodyCodec`, a codec that shows only its fields and its maths
header   what payloads begin with; checks of tensors that come in and of bytes that arrive
bits     codes of 1 to 8 bits, packed into bytes
noise    random numbers keyed by seed, boundary, direction and message
scratch  memory that a codec uses again for its next message
"""
