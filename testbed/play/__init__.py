"""How long does a job take over these links? A trace says what every node does; a player does it over a lab's links.

trace     what nodes work on, send and wait for: the record between algorithms and networks
check     whether a trace makes sense
unlinked  when each of it happens where messages take no time
played    when each of it happened

trace and played need the standard library only: the player reads them inside the guest kernel.
"""
