"""How long does a job take over these links? A trace says what every node does; a player does it over a lab's links.

trace     what nodes work on, send and wait for: the record between algorithms and networks
tracing   what the places of a job do becomes a trace: an observer of the loop that runs its programs; and what was
          played is told to observers, as if the job had run at these times
recorded  what was played becomes the records of a run
check     whether a trace makes sense
totals    how often, how many bytes, how much work
chakra    traces to Chakra's execution traces and back: chakra_file.py is their files, rings.py collectives
recorder  what each rank of a real PyTorch job does; join.py makes the trace
split     what was played, by step and node
unlinked  when each of it happens where messages take no time, or as long as a formula says: without a transport
played    when each of it happened, and its file
steady    whether steps repeat, and what the remaining ones would have been
synthetic a pipeline's trace without a model
shapes    what a model's shapes, a device and a codec's size make of such a trace
data_parallel  the same of workers that hold whole models: a server, rings, delayed aggregation
hybrid    pipelines within replicas and data parallel across them, at the sites of a scenario
scenarios who trains together, over which links: scenarios.toml
churn     who of them is away when, and so who takes part in which step
kinds     the job that is played of a cell of any kind
pipelines a training becomes a job that is played: its sizes, and how long stages work on what
replicas  the same of data parallel training; replica_steps.py has the steps that its certificates are judged by

guests.py -> inside.py -> player.py is the way from a list of jobs to what was played:
job          what is to be played over which lab, and what became of it
guests       has jobs played, in guests side by side or here, and watches
inside       plays jobs one after the other, in a guest or here
connections  TCP between the nodes of a lab
certify      whether links on the virtual clock are what they claim, by a probe that the player plays
player       hands bytes over and takes them; lanes.py says what each lane does next, or has a director choose its
             numbers meanwhile; waiting.py wakes it

trace, played, steady, player, lanes and waiting need the standard library only.
"""
