"""Which codecs exist, and how is a codec's text parsed? Nothing here imports torch.

| module | what it holds | |---|---| | `row.py` | the table's entry for one codec: `CodecRow` and its `Parameter`s | |
`row_files.py` | reads the rows of a family from `rows/FAMILY.toml` | | `table.py` | all rows by name, and lookup of
user-defined classes | | `formula.py` | evaluates a row's formula for the size of a payload | | `counting.py` | memory
traffic and operations of a message on a device, from a row's formulas | | `notation.py` | the grammar: parses a text
into a tree, with positions of errors | | `codec_spec.py` | one codec with its arguments: a tree checked against the
table, and its canonical text | | `placement.py` | the codec of each boundary and direction, from a cell's `codec` | |
`docstrings.py` | documentation from a codec's source | | `codecs_page.py` | generates the tables of codecs/README.md |
"""
