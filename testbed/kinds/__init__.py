"""What do the places of a job of a table `job` have, and how is such a job trained?

train     all places in one process, without a network
coded     what every place may be made of: codecs for its messages, a method for each kind of work
live      a place of such a job, over links
timed     how long each kind of work, encoding and decoding takes, alone on one core

context   a chunk of every sequence, and all weights
decode    a stage of `jobs.decode`: layers, keys and values, a draft model
"""
