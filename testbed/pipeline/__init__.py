"""How does a recipe train: all its places in one process, or each over its links? And what does a stage have?

| module | what it does | torch |
|---|---|---|
| `node` | what a stage has, and does as its program says (`jobs.pipeline`): maths, codecs, optimiser | yes |
| `boundary` | codecs at a boundary: a tensor becomes a payload, and a tensor again | yes |
| `training` | what trainers need of each kind of job | yes |
| `stages` | the same of a pipeline | yes |
| `place` | one place of any kind over links, from end to end | yes |
| `live` | runs any job's program at one place, over sockets | no |
| `alone` | all places of any kind in one process, without a network | yes |
| `pretrain` | trains a model of ours that workloads can begin with, once a machine | yes |
| `at_boundaries` | what codecs make of the tensors at a model's boundaries, for experiments | yes |
| `calibrate` | times every action, encode and decode, alone on one core | yes |
| `calibration` | what a calibration is asked and answers, and its stopwatch | no |
| `optimise` | AdamW, clipped, the same however the model is cut | yes |
| `transport`, `frame` | frames over TCP, and their header | no |
| `pacing` | when things begin and end: this machine's time, or an emulated device's | no |
| `gather`, `ending` | the places meet, and decide alike when a job ends; or one of them tells the others | no |
| `step_log` | writes the records of steps, and tells the controller | no |
| `carried` | measures how long a link was at work | no |
| `memory` | how much a training needs, and how much there is | no |
| `job`, `wiring`, `faults` | what a place is told; its connections; what went wrong, in words | no |
| `control`, `host` | the controller's end of the control plane, and the stage's | no |
"""
