"""How is a recipe trained, in one process or over links, and how long does each action take?

| module | what it does | torch | |---|---|---| | `kinds` | a class for each kind of job: its places and their
requirements | yes | | `stages`, `workers` | the classes for pipelines and for data parallel training | yes | | `alone`
| trains all places in one process, without links | yes | | `accelerator` | the device that it trains on | yes | |
`device_copies` | moves the messages of a live place from and to that device | yes | | `checkpoints` | its checkpoints |
yes | | `place` | trains one place over links | yes | | `calibrate`, `calibrate_workers` | time every action, encode and
decode, one at a time on one core | yes | | `timing` | a calibration's request, response and stopwatch | no | |
`memory_need` | memory required by a training, and memory available | no | | `pretrain` | trains a shipped model from
which workloads can start, once per machine | yes |
"""
