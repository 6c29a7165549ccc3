"""Turns an experiment file into runs.

| module | what it does |
|---|---|
| `plan` | reads the file with its axes and variants, and lists its cells |
| `fields`, `filters` | dotted names of a cell's fields; conditions on them |
| `resolve` | builds and checks the cell of each point of the axes |
| `tune` | chooses the value of one field for each arm by trial runs |
| `estimate` | predicts how long a run will take |
| `conduct` | combines all of these: tunes, orders the runs, makes the missing ones |
| `chaos` | draws random cells, judges their runs, shrinks what fails |
| `reproduction` | lists the sweeps and programs that reproduce an experiment |
| `playing` | makes the played runs: train, calibrate, certify, play, summarise |
| `trainings` | trains each recipe once, without a network |
| `calibrations` | measures durations once, and stores them by content |
| `executor` | runs programs side by side, one per core: tasks in, results out |
| `ray_cluster` | runs tasks on the nodes of a Ray cluster instead |
| `on_node` | runs a task on a machine that shares no folder: files in, program, files out |
| `play_task` | plays jobs as tasks of a cluster, several in a guest |
| `live_virtual` | makes live runs on the virtual clock, each in its own guest |
| `live_in_guest` | the program inside such a guest: lab, stages and their monitor |
| `controller` | makes the live runs on the real clock: certify, train, certify, summarise |
| `live_session` | holds the lab and the stage hosts of one network |
| `recording` | writes the folder of a run, played or live |
| `bounded_steps` | supplies the steps that links are judged by: a run's own, or the expected one |
| `environment` | locks the machine, describes it, and names the clock and engine of the runs |
| `interrupt` | handles Ctrl-C |
| `progress` | displays the progress of the runs |
"""
