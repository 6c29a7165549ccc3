"""Checks a link against its profile: measures it, computes an exact link's readings, and passes or fails it.

certify.py measures and judges all links of a lab, and monitors the host
effort.py   the probe's plan for a link, in the quick and in the full form
judge.py    readings against the profile: echoes and TCP; trains.py: UDP
verdict.py passes or fails one comparison, and names the host if it is at fault
expect.py   the arithmetic of an exact link and of chance
On the virtual clock the player certifies links: testbed/player/certify_links.py.
accuracy.py a grid of links that shows the accuracy of the emulation
"""
