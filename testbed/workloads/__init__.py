"""What is trained? Models split into stages with their texts; small networks with their images.

models        families, named sizes and checkpoints; division of layers
checkpoints   a checkpoint's weight files, and verification of their digests
stage_model   a stage's share of a model: the part common to all families (torch)
precision     autocast to bf16, also fast on CPUs without its instructions (torch)
gpt2, llama   the family-specific part (torch)
build_stage   builds a stage's share, from the seed or from a checkpoint (torch)
weights       reads one stage's weights from a checkpoint (torch)
smollm2       fetches a pretrained model
texts         names of texts and images
sources       fetches a text, bundled or from files; and data sets of the hub
prepare       converts a text into tokens, and images of the hub into pixels, once
windows       cuts tokens into sequences and orders them
floor         the losses of tables of tokens and of pairs
data          serves them as batches (torch)
networks      small image networks and numbers of images
images        digits or a data set of the hub, and networks small enough for data parallel methods (torch)
characters    a language model of characters, many side by side, for data parallel methods (torch)
shards        divides examples among workers, with skewed classes and sizes, and into batches
real_tensors  saves real activations and gradients for benchmarks (torch)
"""
