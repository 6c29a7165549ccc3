"""Plays traces over the links of a lab: real sockets carry the bytes of the trace, at its times.

A list of jobs goes through guests -> play_in_guest -> play_trace.

play_job       a job: which trace over which lab; and its outcome
guests         runs jobs, in parallel guests or on this machine, and monitors them
play_in_guest  plays jobs one after another, in a guest or on this machine
play_trace     the player: sends and receives bytes over sockets, in one loop
lanes          tracks what each lane does next; a director may change its numbers during play
connections    TCP connections between the nodes of a lab
steady         detects that steps repeat, and computes the remaining ones
split          breaks played times down by step and node
virtual        plays a program's own traces on the virtual clock
certify_links  certifies links on the virtual clock, by playing a probe

play_trace, steady and lanes need only the standard library.
"""
