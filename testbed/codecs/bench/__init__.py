"""What do codecs cost, and how wrong are they, on tensors of a real training? `testbed bench codecs` prints it.

`results.py`: what is measured, and the results. `measure.py`: the program that measures. `peers.py`: the same codecs
of other packages, to be measured beside ours.
"""
