"""What is learned? Models cut into stages, and the text that they learn from; small networks, and images.

| module | what it holds | torch |
|---|---|---|
| `models` | families, named sizes and checkpoints; how layers are divided | no |
| `checkpoints` | which files are a checkpoint's weights, and whether they are those that are meant | no |
| `stage_model` | a stage's share of a model: what is the same for every family | yes |
| `gpt2`, `llama` | a family: what is its own | yes |
| `build` | makes a stage's share, from the seed or from a checkpoint | yes |
| `weights` | reads one stage's weights from a checkpoint | yes |
| `smollm2` | fetches a model that has learned | no |
| `texts` | what a text, and images, are called | no |
| `sources` | gets a text: the bundled one, a file; and data sets of the hub | no |
| `prepare` | makes a text into tokens, and images of the hub into pixels, once | no |
| `windows` | cuts tokens into sequences and orders them | no |
| `floor` | says what a model loses that knows word frequencies only | no |
| `data` | serves them as batches | yes |
| `networks` | small networks that learn images, and how many images there are, in numbers | no |
| `images` | digits or a data set of the hub, and networks small enough for data parallel methods | yes |
| `characters` | a language model of characters, many side by side, for data parallel methods | yes |
| `shards` | divides examples among workers, of skewed classes and sizes, and into batches | no |
| `capture` | keeps real activations and gradients for benchmarks | yes |
"""
