"""The commands of the command line, one module per topic. Each parses flags, calls one function, prints the result.

sweep        plan, run, sweep, report
reproduce    an experiment's sweeps and programs, in order, and a verdict per claim
lab          doctor, link, lab, shell
play         play a job's trace over links
execute      run unmodified programs in the nodes of a lab
predict      play jobs whose models are too large to train here, from their shapes
advise       recommend a layout, schedule and codecs
chaos        random cells of every kind, and what is wrong with their runs
traces       traces of jobs: show, draw, export, import, join
rate_traces  varying rates: generate, convert, show
profiles     the link profiles
devices      the emulated devices; record one
codecs       the codecs; check one
bench        measure testbed's links and clocks; codec_bench measures codecs, bench_all everything into one file
vm           the guest kernels
export       results for other programs
docs         generate the pages that are built from tables and CSVs

cluster      shared by the commands that may run their work on a cluster: flags, connection
console      shared by all commands: consoles, tables, flags, the choice of engine and clock
planned      prints the plan of a sweep: cells, run counts, predicted time
"""
