"""Which ratio, staleness, local steps and bits suit a link and a share of the data? Pure functions, no torch.

cycle      duration of an iteration: the time model that all policies share
link_estimate estimates of a link: measured from its messages, or read from its profile
deco       DeCo-SGD: one ratio and staleness for all workers, from rate, delay and computing time
fedluck    FedLuck: local steps and ratio of each device separately
dagc       DAGC: ratios or thresholds by the workers' shares of the data
thresholds gamma-FedHT: a hard threshold that follows the stepsize
precision mixed precision: bits of each boundary, from harm and cost

A ratio is the share of values that is kept: 1 keeps all, smaller ones compress more. A static strategy is a constant
and needs no policy.
"""
