"""What codecs are there, and what does a text that names one mean? Nothing here imports torch.

| module | what it holds |
|---|---|
| `row.py` | what the table says of one codec: `CodecRow` and its `Parameter`s |
| `rows/` | the rows themselves, a module for each family |
| `table.py` | all rows by name, and where the module of anyone's class lies |
| `formula.py` | the value of a row's formula for the size of a payload |
| `counting.py` | what a device does for a message: memory traffic and operations, by a row's formulas |
| `notation.py` | the grammar: a text as a tree, every fault with its place |
| `codec_spec.py` | one codec with its arguments: a tree checked against the table, and its canonical text |
| `placement.py` | which codec stands at which boundary in which direction: what a cell's `codec` says |
| `docstrings.py` | what a codec's own source says of it |
| `codecs_page.py` | the tables of codecs/README.md |
"""
