"""The state of the places of a job: model, optimiser, codecs. The only code of a job that uses torch.

Pipelines:
stage         layers, kept activations, codecs with their state, an optimiser (`jobs.pipeline`)
boundary      the two codecs at a boundary: tensor to payload and back

Data parallel training (`jobs.data_parallel`): a worker holds the whole model, trains on its part of each batch, and
exchanges updates. In a step it computes, sends its message, and applies the aggregates that are due: with staleness 0
the current step's, with staleness tau the one of tau steps ago. All workers apply the same aggregates in the same
order, so their replicas stay identical, except where they average in pairs. Asynchronous rounds (`jobs.asynchronous`)
work differently: the server holds the weights and applies updates as they arrive, without waiting for a particular
worker.
worker_node   a worker or a server: a replica, and the codecs of its messages
worker        one replica: its computation, and the application of an aggregate
learners      learning tasks: a language model on a text, or a small network on images
bucket        all tensors of a worker as one message: codecs for the large ones, the small ones dense
fragments     how a model's tensors are divided: into turns, parts of a ring, coded or dense
aligned       the rows that all workers send alike, agreed on by sketches
low_rank      matrices that are trained in two small bases, which all workers share
pace          a recipe's initial decision, and durations on a worker's emulated device
leader        chooses ratio and staleness during training, from measured links
arrivals      asynchronous rounds: the server's updates and the workers' rounds

Other kinds of job, from a `job` table:
coded         base class of such nodes: codecs for messages, a method per kind of work
context_node  a chunk of every sequence, and all weights (`jobs.context`)
decode_node   layers, keys and values, a draft model (`jobs.decode`)

All of them:
optimise      AdamW, SGD or Muon with clipping, bit-identical for every cut of the model
"""
