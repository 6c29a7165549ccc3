"""Programs of the places of a job: each kind of job is described once, here, and every interpreter runs that.

actions        the actions that a program may yield
loop           runs all places in one process, with or without maths, time, and links as formulas
draws          durations that vary: drawn, stragglers, slow nodes
recorder       records what each place did in a step: actions and messages

pipeline       layers cut into stages; schedule gives the order of a stage's actions
data_parallel  workers that hold whole models and exchange what they computed
decision       parameters that may change during training, and how the leader announces them
asynchronous   workers and a server that never waits for a particular worker
hybrid         pipelines within replicas, data parallel across them; replicas may leave and return
context        sequences split over nodes that exchange keys and values
sampling       workers that sample images, each following a list of actions
decode         autoregressive decoding by a language model cut into stages
kind           kinds named by an experiment's `job` table, shipped or user-defined
"""
