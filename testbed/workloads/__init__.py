"""What is trained? Models split into stages with their texts; small networks with their images.

| module | what it holds | torch | |---|---|---| | `models` | families, named sizes and checkpoints; division of layers
| no | | `checkpoints` | a checkpoint's weight files, and verification of their digests | no | | `stage_model` | a
stage's share of a model: the part common to all families | yes | | `gpt2`, `llama` | the family-specific part | yes | |
`build_stage` | builds a stage's share, from the seed or from a checkpoint | yes | | `weights` | reads one stage's
weights from a checkpoint | yes | | `smollm2` | fetches a pretrained model | no | | `texts` | names of texts and images
| no | | `sources` | fetches a text, bundled or from files; and data sets of the hub | no | | `prepare` | converts a
text into tokens, and images of the hub into pixels, once | no | | `windows` | cuts tokens into sequences and orders
them | no | | `floor` | the losses of tables of tokens and of pairs | no | | `data` | serves them as batches |
yes | | `networks` | small image networks and numbers of images | no | | `images` | digits or a data set of the hub, and
networks small enough for data parallel methods | yes | | `characters` | a language model of characters, many side by
side, for data parallel methods | yes | | `shards` | divides examples among workers, with skewed classes and sizes, and
into batches | no | | `real_tensors` | saves real activations and gradients for benchmarks | yes |
"""
