"""Which values are sent, and how does the receiver know their positions?

sparsifier     common part of sparsifiers; top-k, which sends the positions of the largest values
quantised      the largest values of each chunk, or of a random sample, with a few bits each
random_places  positions that both ends draw from the message key
shared_mask    one mask for both directions: gradients at the positions of the activations
threshold      values of at least a fixed magnitude, up to a maximum share
positions      the search for the largest values, and positions as a bitmap or as indices
"""
