"""How does an experiment file become runs?

| module | what it does |
|---|---|
| `plan` | reads the file, its axes and variants, and makes its cells |
| `fields`, `filters` | dotted names of a cell's fields; conditions on them |
| `resolve` | makes a cell from each point of the axes, and checks it |
| `tune` | chooses one field for each arm by short runs |
| `means` | is what runs are made with: clock, engine, durations |
| `predict` | makes and plays cells from shapes alone, of cells.toml: nothing is trained |
| `churned` | finds which steps such a cell's trainings have where its sites come and go, and has them played |
| `estimate` | says how long a run will take |
| `conduct` | brings all of that together: what is tuned, in which order, what is missing |
| `reproduction` | lists what makes an experiment's numbers again: its sweeps and programs |
| `playing` | makes the played runs: train, calibrate, certify, play, summarise |
| `trainings` | trains each recipe once, without a network |
| `calibration` | has durations measured once, and keeps them by content |
| `executor` | runs programs side by side, one per core: tasks in, results out |
| `live_virtual` | makes live runs on the virtual clock: each in a guest of its own |
| `inside` | is what runs in such a guest: lab, stages and who follows them |
| `controller` | makes the live runs on the real clock: certify, train, certify, summarise |
| `session` | holds the lab and the stage hosts of one network |
| `recording` | fills the folder of a run while it is made, whoever makes it |
| `bounded_steps` | has the steps by which links are judged: a run's own, or the one that is expected |
| `environment` | holds the machine and describes it |
| `interrupt` | says what Ctrl-C means |
| `progress` | shows a person what happens |
"""
