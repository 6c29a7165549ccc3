"""What do the places of a job of a table `job` have, and how is such a job trained?

train     all places in one process, without a network
timed     how long each kind of work, encoding and decoding takes, alone on one core
"""
