"""What does every place of a job do? Each kind of job is told here once, and run everywhere.

actions        what a place may do: the vocabulary of programs
loop           runs all places in one process: with maths or without, in time or without, over links that are formulas
recorder       what each place did in a step: the actions and messages of its records

pipeline       layers cut into stages; schedule says in which order a stage works
data_parallel  workers that hold whole models and exchange what they computed
decision       what may change meanwhile, and how one of them tells the others
asynchronous   the same with a server that waits for nobody
hybrid         pipelines within replicas, data parallel training across them; replicas come and go
context        sequences cut over nodes that exchange keys and values
sampling       workers that sample images, each by a list of actions
decode         a language model's layers cut into stages, which decode tokens one after another
kind           other kinds: those of a table `job` in an experiment, ours and anybody's
"""
