"""How does an experiment file become runs?

| module | what it does |
|---|---|
| `plan` | reads the file, its axes and variants, and makes its cells |
| `fields`, `filters` | dotted names of a cell's fields; conditions on them |
| `resolve` | makes a cell from each point of the axes, and checks it |
| `tune` | chooses one field for each arm by short runs |
| `estimate` | says how long a run will take |
| `replays` | finds the recording that a replay needs |
| `conduct` | brings all of that together: what is tuned, in which order, what is missing |
| `controller` | makes the runs: certify, train, certify, summarise |
| `session` | holds the lab and the stage hosts of one network |
| `executor` | runs programs side by side, one per core: tasks in, results out |
| `trainings` | trains each recipe once, without a network |
| `calibration` | has durations measured once, and keeps them by content |
| `environment` | holds the machine and describes it |
| `interrupt` | says what Ctrl-C means |
| `progress` | shows a person what happens |
"""
