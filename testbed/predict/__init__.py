"""Predicts step times of jobs that are too large to train here: jobs built from shapes alone are played, not trained.

cells                 experiments of cells.toml: resolves the cells, plays them, stores the results
shapes                the trace of a pipeline, from a model's shapes, a device and a codec's sizes
data_parallel_shapes  the same for workers that hold whole models: a server, rings, delayed aggregation
hybrid_shapes         pipelines within replicas, data parallel training across them, at the sites of a scenario
advice                ranks the layouts of a training by their predicted time
in_order              links of a star that keep the order of packets, for advice
scenarios             sites that train together, with their links: scenarios.toml
churn                 when sites are away, and which replicas take part in which step
churned               the steps of a training with churn; plays the missing ones
"""
