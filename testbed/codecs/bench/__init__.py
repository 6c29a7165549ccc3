"""What do codecs cost, and how large are their errors, on tensors of a real training? `testbed bench codecs` prints it.

`measurements.py`: the quantities and results. `measure.py`: the program that measures. `peers.py`: other packages'
versions of the same codecs, for comparison.
"""
