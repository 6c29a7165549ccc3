"""Is a link what it claims to be? Measure it, compute what an exact link would show, and pass or fail it.

certify.py  measure all links of a lab, judge them, and watch the host meanwhile
effort.py   what the probe does on a link, in the quick and in the full form
judge.py    readings against the profile: echoes and TCP; trains.py: UDP
verdict.py  pass or fail one comparison, and name the host where it is at fault
expect.py   the arithmetic of an exact link and of chance
On the virtual clock the player does it: testbed/play/certify.py.
accuracy.py the grid of links that shows how true the emulation is
"""
