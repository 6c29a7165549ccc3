"""Which values go over, and how does the receiver know where they were?

sparsifier     what sparsifiers share; top-k, which sends the positions of the largest values
quantised      the largest of each chunk, or of a random sample, with a few bits each
random_places  places that both ends draw from the message key
shared_mask    one mask for both directions: gradients go where the activations went
threshold      all values of a magnitude, however many there are
positions      the search for the largest values, and positions as a bitmap or as indices
"""
