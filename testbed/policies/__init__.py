"""Which ratio, staleness, local steps and bits, for which link and which share of the data? Pure functions, no torch.

cycle      how long an iteration takes: the time model that all of them share
links      what a link is known to be: measured from what was sent, or read from its profile
deco       DeCo-SGD: one ratio and staleness for all workers, from rate, delay and computing time
fedluck    FedLuck: local steps and ratio of each device by itself
dagc       DAGC: ratios or thresholds by the workers' shares of the data
thresholds gamma-FedHT: a hard threshold that follows the stepsize
precision  mixed precision: bits of each boundary, by what they harm and cost

A ratio is the share of the values that is kept: 1 is everything, a small one compresses most. A static strategy is a
constant, and needs nothing from here.
"""
