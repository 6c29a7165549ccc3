"""Which codecs does the table list? A module for each family, each with a tuple `ROWS`.

`dense.py`: casts and quantisers. `sparse.py`: sparsifiers. `low_rank.py`: two thin factors. `memory.py`: differences
from what was sent before, and error feedback. `wrappers.py`: around any other codec. `in_model.py`: codecs that
change the model.
"""
