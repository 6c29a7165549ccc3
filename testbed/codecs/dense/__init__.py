"""How are all values sent with fewer bits?

cast         fp32, bf16, fp16: the shortest codecs
fp8          8-bit floating point with a scale per token
integer      codes of 1 to 8 bits with a step per token or per group of channels
fixed_point  codes of b bits with a scale per channel over the whole micro-batch
blockwise    8-bit codes of a dynamic map with an absmax per block
uniform      multiples of one step per message, for an entropy coder
rank_one     1 or 2 bits with a magnitude per token and per channel
hadamard     a rotation around any other codec
cosine       a cosine transform of blocks around any other codec
haar         means and differences of neighbouring tokens, around any other codec
tah          4 or 3 bits by a tile's entropy, with tiles rotated that have an outlier
groups       division of tensors into groups, and their shared scales and offsets
"""
