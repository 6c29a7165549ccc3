"""Does a codec keep the rules, ours or a stranger's? `python -m testbed codecs check NAME` asks it.

| module | what it holds |
|---|---|
| `suite.py` | the list of all checks, and the asking; `__main__.py` prints the table |
| `verdicts.py` | how a check says what it saw, and when two values are the same to the bit |
| `subject.py` | the codec under test, and an end of its boundary |
| `claims.py` | what a class may say of itself beyond the contract, so that it can be held to it |
| `tensors.py` | the tensors and message keys that codecs are tried on |
| `apart.py` | work in a child process with little memory and time |
| `size.py`, `exchange.py`, `laws.py`, `oddities.py` | the checks of single messages |
| `memory.py`, `hostile.py`, `cost.py` | the checks of what is remembered, of wrong bytes, of time |
| `in_model.py`, `trial_model.py` | the checks of codecs that change the model, and the small model that they train |
"""
