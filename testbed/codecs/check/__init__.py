"""Does a codec, shipped or user-defined, conform to the contract? `python -m testbed codecs check NAME` tests it.

| module | what it holds |
|---|---|
| `suite.py` | the list of all checks, and running them; `__main__.py` prints the table |
| `verdicts.py` | results of checks, and bit-exact comparison of values |
| `subject.py` | the codec under test, and one end of its boundary |
| `row_claims.py` | optional claims of a class beyond the contract, which are tested |
| `tensors.py` | the test tensors and message keys |
| `apart.py` | the two processes that hold the encoders and the decoders, and run checks |
| `end_process.py`, `seal.py`, `packing.py` | their program; what isolates it; values as bytes |
| `size.py`, `exchange.py`, `laws.py`, `oddities.py` | the checks of single messages |
| `memory_laws.py`, `hostile.py`, `cost.py` | the checks of state, of invalid bytes, of time |
| `in_model_laws.py`, `trial_model.py` | the checks of codecs that change the model, and the small model for them |
"""
