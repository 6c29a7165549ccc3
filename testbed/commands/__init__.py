"""The commands of the command line, a module a theme. Each reads flags, calls one function, prints what came back.

sweep        plan, run, sweep, report
reproduce    an experiment's sweeps and programs, in order, and a verdict per claim
lab          doctor, link, lab, shell
play         play a job over links
predict      play jobs of models too large to train here, from their shapes
traces       what a job does: show, draw, export, import, join
rate_traces  varying rates: generate, convert, show
profiles     the link profiles
devices      the devices that are emulated; record one
codecs       the codecs; check one
bench        measure testbed itself; codec_bench does so for codecs
vm           the guest kernels
export       results for other programs
docs         generate the pages that follow from tables and CSVs

console      what they share: consoles, tables, flags, the choice of engine and clock
planned      what a sweep is going to do, for people
"""
