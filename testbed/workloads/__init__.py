"""What is learned: models cut into stages, and the text that they learn from.

`table` (no torch) names the models, `prepare` makes token files, `windows` (no torch) cuts and orders them, `data` serves
batches, `build` builds a stage's share of a model (`model`, `gpt2`, `llama`).
"""
