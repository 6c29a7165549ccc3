"""What is learned: models cut into stages, and the text that they learn from.

Without torch: `table` names the models and `texts` the texts; `windows` cuts and orders what `prepare` makes of a text that
`sources` gets. With torch: `data` serves batches; `build` builds a stage's share of a model (`model`, `gpt2`, `llama`) from the
seed or from `weights`; `checkpoint` puts the shares together again; `smollm2` fetches a model that has learned.
"""
