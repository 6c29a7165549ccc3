"""testbed: what does a codec do to wall-clock time and convergence when one model is trained over slow links?

The flow is one way: experiment files -> `sweep.plan` -> `Cell` -> lab and stage hosts -> result files -> `metrics` -> `report`.
"""

__version__ = "0.1.0"
