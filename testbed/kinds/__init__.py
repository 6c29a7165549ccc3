"""What do the places of a job of a table `job` have?

coded     what every place may be made of: codecs for its messages, a method for each kind of work

context   a chunk of every sequence, and all weights
decode    a stage of `jobs.decode`: layers, keys and values, a draft model
"""
