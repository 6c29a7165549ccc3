"""How is a recipe trained, in one process or over links, and how long does each action take?

kinds                         a class for each kind of job: its places and their requirements (torch)
stages, workers               the classes for pipelines and for data parallel training (torch)
alone                         trains all places in one process, without links (torch)
accelerator                   the device that it trains on (torch)
device_copies                 moves the messages of a live place from and to that device (torch)
checkpoints                   its checkpoints (torch)
place                         trains one place over links (torch)
calibrate, calibrate_workers  time every action, encode and decode, one at a time on one core (torch)
timing                        a calibration's request, response and stopwatch
memory_need                   memory required by a training, and memory available
pretrain                      trains a shipped model from which workloads can start, once per machine (torch)
"""
