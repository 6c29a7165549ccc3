"""What does one worker of data parallel training do?

It holds the whole model, learns from its part of each batch, and exchanges what it learned with the others. In a step
it computes, hands its message over, and applies the aggregates that are due: with staleness 0 that of this step, with
staleness tau that of tau steps ago. Everyone applies the same aggregates in the same order, so all replicas are alike.

Asynchronous rounds are otherwise: a server has the weights, applies what has arrived, and waits for nobody.

bucket    all tensors of a worker as one message: codecs for the large ones, the small ones dense
fragments how a model's tensors are divided: what is exchanged in turn, round a ring, coded or dense
exchange  how messages become aggregates: a server, every worker for itself, a ring
learners  what workers learn: a language model on a text, or a small network on images
worker    one replica: what it computes, and what it does with an aggregate
worker_node  what workers and servers have: a replica, and the codecs of their messages
calibrate times what workers compute, and what codecs do with their messages, alone on one core
pace      what a recipe begins with, and how long a worker's emulated device takes for what
leader    who chooses while training lasts, by what links carry
training  the workers of a recipe and a server, as `pipeline.alone` and `pipeline.place` train them
arrivals  what they have in asynchronous rounds: a server applies what has arrived, a worker makes round after round
events    asynchronous rounds in one process, with formulas for links
federated federated averaging of digits in one process, round by round
stacked   many short trainings of a small network side by side
stacked_text  the same of a language model of characters, with any codec, local steps, choices that change, cut models
tuned_text    its methods at the learning rates that suit them
"""
