"""Which codecs does the table list? One module per family, each with a tuple `ROWS`.

`dense.py`: casts and quantisers. `sparse.py`: sparsifiers. `low_rank.py`: two thin factors. `memory.py`: differences
from earlier messages, and error feedback. `wrappers.py`: around any other codec. `in_model.py`: codecs that change the
model.
"""
